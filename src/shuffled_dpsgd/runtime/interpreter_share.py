"""Leaves the main thread its share of the interpreter while other threads work.

Every operation of torch releases the interpreter, and has to wait for it again behind all threads
that want it too. With a dozen of them the main thread's operations take ten times as long. So of
the threads that work beside it only a few run at a time. One that waits for something else, such as
a process that compiles, lets another run meanwhile.

A thread waits for its turn for a while only: those that run may be waiting for it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

MOST_AT_A_TIME = 2
PATIENCE_SECONDS = 0.25


class InterpreterShare:
    """Has at most so many threads run at a time, as far as they ask."""

    def __init__(self, most: int = MOST_AT_A_TIME, patience: float = PATIENCE_SECONDS) -> None:
        self._turns = threading.Semaphore(most)
        self._patience = patience
        self._here = threading.local()

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Run inside when it is this thread's turn, or it has waited for long."""
        self._take()
        try:
            yield
        finally:
            self._give_back()

    @contextmanager
    def given_back(self) -> Iterator[None]:
        """Let another thread run while this one waits inside; nothing where none was `taken`."""
        had_turn = self._give_back()
        try:
            yield
        finally:
            if had_turn:
                self._take()

    def _take(self) -> None:
        self._here.has_turn = self._turns.acquire(timeout=self._patience)

    def _give_back(self) -> bool:
        """Whether there was a turn to give back."""
        had_turn: bool = getattr(self._here, "has_turn", False)
        self._here.has_turn = False
        if had_turn:
            self._turns.release()
        return had_turn


# That of the threads that compile and try kernels: all work of this process beside its own.
SHARE = InterpreterShare()
