"""Backends: which of them serve on a device, and which have run.

A backend is a faster way to compute what plain torch computes too, such as a kernel in Triton.
Whether it serves is not read off version numbers. It is probed once in a process, on a small
problem with a known result. A backend that fails its probe is switched off, with one warning that
gives the reason and what it costs. What a probe compiles is in Triton's cache afterwards, so that
probing takes milliseconds in the next process.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import threading
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch

from shuffled_dpsgd.runtime.notices import say_once

TRITON_SWITCH = "SHUFFLED_DPSGD_TRITON"
# Names of backends to do without, separated by commas.
WITHOUT = "SHUFFLED_DPSGD_WITHOUT"
# By backend and device: why it does not serve, or None.
_reasons: dict[tuple[str, torch.device], str | None] = {}
# Held while a backend is probed. A probe may ask whether another backend serves.
_probing = threading.RLock()
# By task: the backends that have done it in this process.
TAKEN: defaultdict[str, set[str]] = defaultdict(set)


@functools.cache
def triton_available() -> bool:
    """Whether Triton can be imported, which this does not do; `SHUFFLED_DPSGD_TRITON=0` says no."""
    if os.environ.get(TRITON_SWITCH, "1") == "0":
        return False
    return importlib.util.find_spec("triton") is not None


@dataclass(frozen=True, kw_only=True)
class Backend:
    """One faster way, and how to tell whether it works.

    `probe` computes a small problem on a device by this backend and raises whatever goes wrong,
    `WrongResult` included. `instead` and `cost` are for the reader of the warning.
    """

    name: str
    instead: str
    cost: str
    probe: Callable[[torch.device], None]

    def serves(self, device: torch.device) -> bool:
        """Whether this backend may be used on `device`; probed when first asked."""
        key = (self.name, device)
        if key not in _reasons:
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                return False  # A probe reads its result, which a capture forbids.
            with _probing:
                if key not in _reasons:
                    _reasons[key] = self._reason_against(device)
        return _reasons[key] is None

    def _reason_against(self, device: torch.device) -> str | None:
        """Why this backend must not be used, said aloud; None if its probe passes."""
        if self.name in os.environ.get(WITHOUT, "").split(","):
            return f"switched off by {WITHOUT}"
        try:
            with _undisturbed(device):
                self.probe(device)
        except torch.OutOfMemoryError:
            raise  # A lack of memory is no fault of the backend.
        except Exception as error:
            lines = str(error).strip().splitlines() or [""]
            reason = f"{type(error).__name__}: {lines[0][:300]}"
            say_once(f"{self.name} is off: {reason}. {self.instead} instead; {self.cost}.")
            return reason
        return None


class WrongResult(Exception):  # noqa: N818
    """A backend computed something else than plain torch."""


def expect_close(
    found: torch.Tensor, expected: torch.Tensor, *, rtol: float, what: str = "result"
) -> None:
    """Raise `WrongResult` if `found` is off by more than `rtol` of the largest expected number."""
    wide = found.detach().cpu().double()
    error = float((wide - expected.cpu().double()).abs().max())
    allowed = rtol * float(expected.double().abs().max())
    expect(error <= allowed, f"{what} off by {error:.3g}, more than {allowed:.3g}")


def expect(holds: bool, otherwise: str) -> None:
    """Raise `WrongResult` unless `holds`."""
    if not holds:
        raise WrongResult(otherwise)


@contextmanager
def _undisturbed(device: torch.device) -> Iterator[None]:
    """Settings under which a probe depends on nothing its caller has set."""
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.autocast(device.type, enabled=False))
        if device.type == "cuda":
            stack.enter_context(torch.cuda.device(device))
            mode = torch.cuda.get_sync_debug_mode()
            if mode:
                # torch warns that this mode is a prototype whenever it is set.
                stack.enter_context(warnings.catch_warnings())
                warnings.simplefilter("ignore")
                torch.cuda.set_sync_debug_mode(0)
                stack.callback(torch.cuda.set_sync_debug_mode, mode)
        yield


def taken() -> dict[str, tuple[str, ...]]:
    """What this process has done, and by which backends."""
    return {task: tuple(sorted(backends)) for task, backends in sorted(TAKEN.items())}


def switched_off() -> dict[str, str]:
    """The backends that failed their probe in this process, each with the reason."""
    found = {name: reason for (name, _), reason in _reasons.items() if reason is not None}
    return dict(sorted(found.items()))


def report() -> dict[str, object]:
    """Both, as the summaries of runs and benchmarks record them."""
    return {"taken": taken(), "off": switched_off()}
