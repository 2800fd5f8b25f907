"""Backends: which of them serve on a device, and which have run.

A backend is a faster way to compute what plain torch computes too, such as a kernel in Triton.
Whether it serves is not read off version numbers. It is probed once, on a small problem with a
known result, and the outcome is kept in a probe cache on disk. A backend that fails its probe is
switched off, with one warning that gives the reason and what it costs.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from shuffled_dpsgd import __version__
from shuffled_dpsgd.runtime.notices import say_once

TRITON_SWITCH = "SHUFFLED_DPSGD_TRITON"
# By backend and device: why it does not serve, or None.
_reasons: dict[tuple[str, torch.device], str | None] = {}
# Held while a backend is probed. A probe may ask whether another backend serves.
_probing = threading.RLock()
_taken: dict[str, set[str]] = {}


@functools.cache
def triton_available() -> bool:
    """Whether Triton can be imported; `SHUFFLED_DPSGD_TRITON=0` turns it off.

    Answered once in a process, without importing Triton.
    """
    if os.environ.get(TRITON_SWITCH, "1") == "0":
        return False
    return importlib.util.find_spec("triton") is not None


@dataclass(frozen=True, kw_only=True)
class Backend:
    """One faster way, and how to tell whether it works.

    `probe` computes a small problem on a device by this backend and raises whatever goes wrong,
    `WrongResult` included. Its outcome holds as long as the sources in `package` stay the same.
    `instead` and `cost` are for the reader of the warning. A backend that is not cached is probed
    in every process: its probe is quick, and what it needs may come and go.
    """

    name: str
    package: str
    instead: str
    cost: str
    probe: Callable[[torch.device], None]
    is_cached: bool = True

    def serves(self, device: torch.device) -> bool:
        """Whether this backend may be used on `device`; probed when first asked."""
        key = (self.name, device)
        if key not in _reasons:
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                return False  # A probe reads its result, which a capture forbids.
            with _probing:
                if key not in _reasons:
                    _reasons[key] = self._judge(device)
        return _reasons[key] is None

    def _judge(self, device: torch.device) -> str | None:
        """The reason against this backend, from the cache or found now."""
        again = ""
        if self.is_cached:
            entry = probe_path(self, device)
            reason, found = _read(entry)
            if not found:
                reason = self._probe(device)
                _write(entry, self.name, reason)
            again = f" To try it again, delete {entry}."
        else:
            reason = self._probe(device)
        if reason is not None:
            say_once(f"{self.name} is off: {reason}. {self.instead} instead; {self.cost}.{again}")
        return reason

    def _probe(self, device: torch.device) -> str | None:
        try:
            with _undisturbed(device):
                self.probe(device)
        except torch.OutOfMemoryError:
            raise  # Says nothing about the backend.
        except Exception as error:
            lines = str(error).strip().splitlines() or [""]
            return f"{type(error).__name__}: {lines[0][:300]}"
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


def took(task: str, backend: str) -> None:
    """Note that `task` was done by `backend`."""
    _taken.setdefault(task, set()).add(backend)


def taken() -> dict[str, tuple[str, ...]]:
    """What this process has done, and by which backends."""
    return {task: tuple(sorted(backends)) for task, backends in sorted(_taken.items())}


def switched_off() -> dict[str, str]:
    """The backends that failed their probe in this process, each with the reason."""
    found = {name: reason for (name, _), reason in _reasons.items() if reason is not None}
    return dict(sorted(found.items()))


def report() -> dict[str, object]:
    """Both, as the summaries of runs and benchmarks record them."""
    return {"taken": taken(), "off": switched_off()}


def cache_folder() -> Path:
    """`$SHUFFLED_DPSGD_CACHE`, else `shuffled_dpsgd` in the user's folder for caches."""
    chosen = os.environ.get("SHUFFLED_DPSGD_CACHE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shuffled_dpsgd"


def probe_path(backend: Backend, device: torch.device) -> Path:
    """The file that keeps the outcome of a probe; its name depends on all the outcome does."""
    facts = facts_of(device) | {"name": backend.name, "source": source_digest(backend.package)}
    name = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
    return cache_folder() / f"probe-{name}.json"


def facts_of(device: torch.device) -> dict[str, object]:
    """What the outcome of a probe depends on beside the kernels themselves."""
    facts: dict[str, object] = {
        "device": device.type,
        "torch": torch.__version__,
        "triton": _triton_version(),
        "shuffled_dpsgd": __version__,
    }
    if device.type == "cuda":
        facts |= {
            "device": torch.cuda.get_device_name(device),
            "capability": torch.cuda.get_device_capability(device),
            "cuda": torch.version.cuda,
            "driver": _driver_version(),
        }
    return facts


@functools.cache
def source_digest(package: str) -> str:
    """A digest of all sources of a package, or of a single module."""
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    folders = spec.submodule_search_locations
    paths = sorted(Path(folders[0]).rglob("*.py")) if folders else [Path(spec.origin)]
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _read(entry: Path) -> tuple[str | None, bool]:
    """The reason a probe left behind, and whether there is anything to read."""
    try:
        kept = json.loads(entry.read_text())
        return kept["reason"], True
    except (OSError, ValueError, TypeError, KeyError):
        return None, False


def _write(entry: Path, name: str, reason: str | None) -> None:
    unfinished = entry.with_name(f".{entry.name}.{os.getpid()}")
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(json.dumps({"backend": name, "reason": reason}) + "\n")
        unfinished.replace(entry)
    except OSError:
        return  # A read-only home: the next process probes again.


def _driver_version() -> str | None:
    """The line in which NVIDIA's driver on Linux says what it is."""
    try:
        return Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    except (OSError, IndexError):
        return None


def _triton_version() -> str | None:
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return None
