"""Lets several processes prepare at once and be timed one after the other.

Compilation takes minutes and a timing seconds, so workloads are worth preparing side by side; but
nothing may compile or compute while somebody is timed. The processes share a folder. Each drops a
file there when it is prepared, waits until all have, and is timed under a lock of that folder.

A process that fails drops its file as well, so that the others go on without it, and one that is
killed loses the lock. One that is killed before it is prepared leaves no file: the others give up
after their time limit.
"""

from __future__ import annotations

import fcntl
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

READY = ".ready"


@dataclass(frozen=True, kw_only=True)
class Turns:
    """One of `total` processes that share `folder`, which is empty or absent at the start."""

    folder: Path
    total: int
    limit_seconds: float
    poll_seconds: float = 0.2

    @contextmanager
    def taking_part(self) -> Iterator[None]:
        """Whatever ends this block, be it SIGTERM, the other processes no longer wait for us."""
        self.folder.mkdir(parents=True, exist_ok=True)
        before = signal.signal(signal.SIGTERM, leave)
        try:
            yield
        finally:
            self.arrive()
            signal.signal(signal.SIGTERM, before)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Wait for all processes, then hold the lock; a TimeoutError if they do not all come."""
        self.arrive()
        self.wait()
        with (self.folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                yield
            finally:
                # Closing is not enough where a child process has inherited the file.
                fcntl.flock(lock, fcntl.LOCK_UN)

    def arrive(self) -> None:
        (self.folder / f"{os.getpid()}{READY}").touch()

    def wait(self) -> None:
        start = time.monotonic()
        while (ready := len(list(self.folder.glob(f"*{READY}")))) < self.total:
            if time.monotonic() - start > self.limit_seconds:
                raise TimeoutError(
                    f"{ready} of {self.total} processes came to {self.folder} within "
                    f"{self.limit_seconds:.0f} s; nobody is timed before all are prepared"
                )
            time.sleep(self.poll_seconds)


def leave(number: int, frame: FrameType | None) -> None:
    """End as a failure would, so that what has to be tidied up is."""
    raise SystemExit(128 + number)
