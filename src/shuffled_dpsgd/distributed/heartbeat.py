"""Which rank the others wait for, told while they wait.

Every few seconds a thread of each rank writes to the launch's store how often this rank has met the
others. A rank that has waited for long reads there who is behind.
"""

from __future__ import annotations

import atexit
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

BEAT_S, PATIENCE_S = 5.0, 60.0
_MEETINGS = "shuffled_dpsgd/meetings"


class Heartbeat:
    """The thread of one rank; it ends with the process, or with `end`.

    `ranks` are those that meet. Other groups of the same ranks count by another `name`.
    """

    def __init__(self, store: Any, rank: int, ranks: Sequence[int], *, name: str) -> None:
        self._store = store
        self._rank = rank
        self._name = name
        self._others = [other for other in ranks if other != rank]
        self._meetings = 0
        self._since: float | None = None
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()
        atexit.register(self.end)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around a call in which all ranks meet."""
        self._meetings += 1
        self._since = time.monotonic()
        yield
        self._since = None

    def missing(self) -> str:
        """Who has not come to the meeting that this rank has waited at; empty if nobody knows."""
        since = self._since
        # What the others last wrote may be a beat old.
        if since is None or time.monotonic() - since < 2 * BEAT_S:
            return ""
        try:
            behind = [r for r in self._others if self._meetings_of(r) < self._meetings]
        except RuntimeError:
            return ""  # The store is gone with the rank that held it.
        return " and ".join(f"rank {rank}" for rank in behind)

    def end(self) -> None:
        """Stop before the store is gone."""
        atexit.unregister(self.end)
        self._ending.set()
        self._thread.join()

    def _meetings_of(self, rank: int) -> int:
        key = self._key(rank)
        return int(self._store.get(key)) if self._store.check([key]) else 0

    def _key(self, rank: int) -> str:
        return f"{_MEETINGS}/{self._name}/{rank}"

    def _beat(self) -> None:
        told = 0
        while not self._ending.wait(BEAT_S):
            try:
                self._store.set(self._key(self._rank), str(self._meetings))
            except RuntimeError:
                return
            since = self._since
            waited = 0.0 if since is None else time.monotonic() - since
            if waited >= PATIENCE_S and told != self._meetings and (names := self.missing()):
                told = self._meetings
                text = f"rank {self._rank} has waited {waited:.0f} s for {names}"
                print(text, file=sys.stderr, flush=True)
