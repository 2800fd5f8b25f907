"""Begins to compile in processes: once in a process, and as early as can be."""

from __future__ import annotations

import atexit
import functools
import importlib
import sys
import threading
from collections import Counter
from collections.abc import Callable

from shuffled_dpsgd.runtime import launchers
from shuffled_dpsgd.runtime.compiling.triton_hook import TritonHook, install
from shuffled_dpsgd.runtime.compiling.workers import Workers
from shuffled_dpsgd.runtime.notices import say_once
from shuffled_dpsgd.runtime.triton_support import triton_available

_NOT_STARTED = "Kernels are compiled in this process, and the first steps take longer: "
_hooks: list[TritonHook] = []
# Started before it was known whether there would be a run; the first run takes them over.
_early: list[Workers] = []


@atexit.register
def _end() -> None:
    """Let the processes go when this one ends.

    What still rehearses has been waited for by then: `rehearsals` imports this module before it
    registers its own end, and what is registered last is called first.
    """
    for hook in _hooks:
        hook.close()
    for workers in _early:
        workers.close()


class _Once:
    """Work that is done once; whoever calls it meanwhile waits."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._work: Callable[[], object] | None = work
        self._lock = threading.Lock()

    def __call__(self) -> None:
        with self._lock:
            work, self._work = self._work, None
            if work is not None:
                work()


def _make_driver() -> None:
    """Triton's driver is a C program, which is compiled on a new machine."""
    try:
        _ = importlib.import_module("triton.runtime.driver").driver.active
    except Exception:  # Whoever launches a kernel will say what is wrong.
        return


def _digest_triton() -> None:
    """Keys of Triton's cache depend on a digest of its libraries, some hundred megabytes."""
    importlib.import_module("triton.runtime.cache").triton_key()


_driver, _digest = _Once(_make_driver), _Once(_digest_triton)


def _import_compiler() -> None:
    """Import PyTorch's compiler, and Triton with it, while no thread of ours imports anything.

    PyTorch does so with the first optimizer, where threads may be at work by then.
    """
    importlib.import_module("torch._dynamo")


def begin_early() -> None:
    """Start the processes before it is known whether there will be a run, which `begin` tells.

    Until then they import what they need and compile what trials and popular layers need, while
    this process loads its data. The GPU is left alone: whoever imports this package may still
    choose one, or none.
    """
    if sys.platform != "linux" or not triton_available() or _hooks or _early:
        return
    try:
        _early.append(Workers(is_early=True))
    except OSError:  # There may never be a run; `begin` tries again, and says so.
        return
    _import_compiler()
    # Not imported for its sake: two threads that import at a time may see half a module.
    if "triton.runtime.cache" in sys.modules:
        threading.Thread(target=_digest, name="compiling", daemon=True).start()


def begin() -> None:
    """Start the processes, and whatever Triton has to do here before it can ask them.

    Again if they have left since. Does nothing where there is no Triton, or no Linux.
    """
    if sys.platform != "linux" or not triton_available():
        return
    if not _hooks:
        _begin()
    elif (before := _hooks[0].workers) is not None and before.have_left:
        before.close()
        _hooks[0].workers = _start()


@functools.cache
def _begin() -> None:
    # First of all: while this process imports Triton, so do they.
    workers = _start()
    if workers is None:
        return
    _import_compiler()
    if not launchers.make_safe_for_threads():
        workers.close()
        return
    hook = install(workers, _digest)
    if hook is None:
        workers.close()
        say_once(f"{_NOT_STARTED}this release of Triton compiles in a way that is not known")
        return
    _hooks.append(hook)
    for work in (_driver, _digest):
        threading.Thread(target=work, name="compiling", daemon=True).start()


def _start() -> Workers | None:
    """New processes, or those that were started early, if they are still there."""
    early = _early.pop() if _early else None
    if early is not None and not early.have_left:
        return early
    if early is not None:
        early.close()
    try:
        return Workers()
    except OSError as error:
        say_once(f"{_NOT_STARTED}no other could be started ({error})")
        return None


def wait_for_driver() -> None:
    """Return once Triton's driver is there; several threads would make one each."""
    if triton_available():
        _driver()


def tally() -> dict[str, int]:
    """Where compiled kernels came from in this process: "on disk", "a worker", "this process"."""
    return dict(sum((hook.tally for hook in _hooks), Counter[str]()))
