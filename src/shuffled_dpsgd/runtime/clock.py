"""Where the time of a run goes: every moment belongs to exactly one part.

On a GPU the parts are told apart by events in its queue, so that work is charged to the part that
asked for it and not to the part that happens to wait. Nothing is waited for until the result is
asked for.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import torch

OTHER = "other"
# How many moments are kept before they are read; those of one step are a few dozen.
_MAX_PENDING = 1024


class Moment:
    """Now, by the host's clock; or when the device gets here in its queue."""

    __slots__ = ("at", "event")

    def __init__(self, *, on_gpu: bool) -> None:
        self.at = time.perf_counter()
        self.event = torch.cuda.Event(enable_timing=True) if on_gpu else None
        if self.event is not None:
            self.event.record()

    def is_over(self) -> bool:
        """Whether host and device have passed it."""
        return self.event is None or bool(self.event.query())

    def seconds_until(self, later: Moment) -> float:
        """Seconds between this moment and a later one; waits for the later one."""
        if self.event is None or later.event is None:
            return later.at - self.at
        later.event.synchronize()
        return self.event.elapsed_time(later.event) / 1e3


class Clock:
    """Charges time to parts. A part entered inside another one interrupts it.

    >>> clock = Clock()
    >>> clock.start()
    >>> with clock.part("data"):
    ...     pass
    >>> sorted(clock.seconds())
    ['data', 'other']
    """

    def __init__(self, device: str = "cpu") -> None:
        self._on_gpu = device == "cuda"
        self._seconds: dict[str, float] = defaultdict(float)
        self._pending: list[tuple[str, Moment]] = []
        self._current: str | None = None

    def start(self, part: str = OTHER) -> None:
        """Begin anew: charge the time from now on, to `part` unless another is entered."""
        self._seconds.clear()
        self._pending = []
        self._switch(part)

    def stop(self) -> None:
        """Charge no time until the next `start`."""
        if self._current is not None:
            self._switch(None)
            self._read()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Charge the time inside to `name`, then to the part before again."""
        before = self._current
        if before is None:
            yield
            return
        self._switch(name)
        try:
            yield
        finally:
            self._switch(before)

    def turn_to(self, name: str) -> None:
        """Charge the time from now on to `name`."""
        if self._current is not None:
            self._switch(name)

    def seconds(self) -> dict[str, float]:
        """Seconds of every part so far; waits for the device."""
        if self._current is not None:
            self._switch(self._current)
        self._read()
        return dict(self._seconds)

    def _switch(self, part: str | None) -> None:
        if self._on_gpu and torch.cuda.is_current_stream_capturing():
            return
        self._current = part
        self._pending.append((part or "", Moment(on_gpu=self._on_gpu)))
        if len(self._pending) >= _MAX_PENDING:
            self._read(wait=False)

    def _read(self, *, wait: bool = True) -> None:
        """Add up what is pending; without `wait`, as far as the device has come."""
        read = 0
        for (part, begin), (_, end) in pairwise(self._pending):
            if not wait and not end.is_over():
                break
            if part:
                self._seconds[part] += begin.seconds_until(end)
            read += 1
        self._pending = self._pending[read:]
