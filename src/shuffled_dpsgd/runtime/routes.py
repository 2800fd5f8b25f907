"""Faster routes: which of them serve on a device, and which have run.

A route is a faster way to compute what a plain way computes too, such as a kernel in Triton.
Whether it serves is not read off version numbers. It is tried once, on a small problem with a
known result, and the verdict is remembered on disk (`verdicts`). A route that fails its trial is
switched off, with one warning that gives the reason and what it costs.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch

from shuffled_dpsgd.runtime import verdicts
from shuffled_dpsgd.runtime.notices import say_once

# By route and device: why it does not serve, or None.
_reasons: dict[tuple[str, torch.device], str | None] = {}
# Held while a route is tried. A trial may ask whether another route serves.
_trying = threading.RLock()
_taken: dict[str, set[str]] = {}


@dataclass(frozen=True, kw_only=True)
class Route:
    """One faster way, and how to tell whether it works.

    `trial` computes a small problem on a device by this route and raises whatever goes wrong,
    `WrongResult` included. A verdict holds as long as the sources in `package` stay the same.
    `instead` and `cost` are for the reader of the warning. A route that is not remembered is tried
    in every process: its trial is quick, and what it needs may come and go.
    """

    name: str
    package: str
    instead: str
    cost: str
    trial: Callable[[torch.device], None]
    is_remembered: bool = True

    def serves(self, device: torch.device) -> bool:
        """Whether this route may be taken on `device`; tried when first asked."""
        key = (self.name, device)
        if key not in _reasons:
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                return False  # A trial reads its result, which a capture forbids.
            with _trying:
                if key not in _reasons:
                    _reasons[key] = self._judge(device)
        return _reasons[key] is None

    def _judge(self, device: torch.device) -> str | None:
        """The reason against this route, remembered or found now."""
        if self.is_remembered:
            reason, again = self._remembered(device)
        else:
            reason, again = self._try(device), ""
        if reason is not None:
            say_once(f"{self.name} is off: {reason}. {self.instead} instead; {self.cost}.{again}")
        return reason

    def _remembered(self, device: torch.device) -> tuple[str | None, str]:
        """The same with what is on disk, and how to have the route tried again."""
        memory = verdicts.Memory(device)
        entry = memory.find(self.name, self.package)
        if entry is None:
            entry = verdicts.TrialVerdict(reason=self._try(device))
            memory.keep(self.name, self.package, entry)
        return entry.reason, f" To try it again, delete {memory.path}."

    def _try(self, device: torch.device) -> str | None:
        try:
            with _undisturbed(device):
                self.trial(device)
        except torch.OutOfMemoryError:
            raise  # Says nothing about the route.
        except Exception as error:
            lines = str(error).strip().splitlines() or [""]
            return f"{type(error).__name__}: {lines[0][:300]}"
        return None


class WrongResult(Exception):  # noqa: N818
    """A route computed something else than the plain way."""


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
    """Settings under which a trial depends on nothing its caller has set."""
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


def took(task: str, route: str) -> None:
    """Note that `task` was done by `route`."""
    _taken.setdefault(task, set()).add(route)


def taken() -> dict[str, tuple[str, ...]]:
    """What this process has done, and by which routes."""
    return {task: tuple(sorted(routes)) for task, routes in sorted(_taken.items())}


def switched_off() -> dict[str, str]:
    """The routes that failed their trial in this process, each with the reason."""
    found = {name: reason for (name, _), reason in _reasons.items() if reason is not None}
    return dict(sorted(found.items()))


def report() -> dict[str, object]:
    """Both, as the summaries of runs and benchmarks record them."""
    return {"taken": taken(), "off": switched_off()}
