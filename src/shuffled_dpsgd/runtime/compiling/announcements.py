"""Tells workers at once of all kernels that a piece of work is going to need.

Work that launches several new kernels would wait for each of them in turn. So when the first is
missing, the work is run once more inside itself, as an announcement: nothing is launched, and
whatever is missing is asked for without waiting. What an announcement computes is undefined, since
no kernel has written anything. So it must be nothing that anyone looks at, and no kernel of torch
may take it for indices.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Work = Callable[[], object]


class _Here(threading.local):
    """What the thread is doing."""

    work: Work | None = None
    announces: bool = False
    is_urgent: bool = True


_here = _Here()
_lock = threading.Lock()
_announcing = 0
_run: Any = None


def is_announcing() -> bool:
    """Whether what is computed here is undefined, because nothing is launched."""
    return _here.announces


def is_urgent() -> bool:
    """Whether somebody waits for the kernels that are needed here, or soon will."""
    return _here.is_urgent


@contextmanager
def announced_by(work: Work | None, *, is_urgent: bool = True) -> Iterator[None]:
    """Have `work` run as an announcement as soon as a kernel is missing inside."""
    _here.work, _here.is_urgent = work, is_urgent
    try:
        yield
    finally:
        _here.work, _here.is_urgent = None, True


def announce() -> None:
    """Run the announcement of the work that is being done, unless that has happened."""
    work, _here.work = _here.work, None
    if work is None or _here.announces:
        return
    with _launching_nothing():
        try:
            work()
        except Exception:  # The work itself is still to come, and will say what is wrong.
            return


@contextmanager
def _launching_nothing() -> Iterator[None]:
    """Have Triton launch no kernel in this thread."""
    global _announcing, _run
    kernels = importlib.import_module("triton.runtime.jit").JITFunction
    with _lock:
        if _announcing == 0:
            _run = kernels.run
            kernels.run = _run_or_not
        _announcing += 1
    _here.announces = True
    try:
        yield
    finally:
        _here.announces = False
        with _lock:
            _announcing -= 1
            if _announcing == 0:
                kernels.run = _run


def _run_or_not(kernel: Any, *args: Any, warmup: bool = False, **given: Any) -> Any:
    return _run(kernel, *args, warmup=warmup or _here.announces, **given)
