"""Work that waits for no other work, done at the same time as that while a CUDA graph is recorded.

A few launches of settling fill the GPU for long; a hundred others are over before it has filled.
Each group waits for nothing of the other, so the small ones can run in the gaps of the large. In a
recorded graph that costs nothing: there the streams only say what has to wait for what. Outside of
a recording everything stays on one stream, one after the other, with the same results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Protocol, TypeVar

import torch

# Streams beside the one that is recorded; with none, all work is done on that.
SIDE_STREAMS = 2
Result = TypeVar("Result")
Lane = Sequence[Callable[[], Result]]


class Branches(Protocol):
    """Streams of work beside the current one, which is the trunk."""

    def aside(self, number: int) -> AbstractContextManager[None]:
        """Inside, work goes to a branch and waits for what the trunk was asked for before."""
        ...

    def join(self) -> None:
        """Let whatever the trunk is asked for from now on wait for all branches."""
        ...


_BRANCHES: ContextVar[Branches | None] = ContextVar("_BRANCHES", default=None)


@contextmanager
def branching(branches: Branches) -> Iterator[None]:
    """Let `side_by_side` use these branches inside."""
    token = _BRANCHES.set(branches)
    try:
        yield
    finally:
        _BRANCHES.reset(token)


def side_by_side(trunk: Lane[Result], *sides: Lane[Result]) -> list[list[Result]]:
    """The results of every job, lane by lane, the trunk's first.

    The jobs of a lane are done in their order. No job may read or write what a job of another lane
    writes. Large work belongs on the trunk: what is on the sides goes before it.

    Memory is given back to the stream it was taken on, and from there at once to that stream's next
    taker, who may be ahead of another stream that still reads it. So whatever crosses streams must
    be held until all have met again: what jobs read is, by the jobs themselves, if they hold it;
    what they return is by this function. Inside a job there is one stream.
    """
    branches = _BRANCHES.get()
    if branches is None or not any(sides):
        return [[job() for job in lane] for lane in (trunk, *sides)]
    token = _BRANCHES.set(None)
    try:
        found: list[list[Result]] = []
        for number, lane in enumerate(sides):
            with branches.aside(number):
                found.append([job() for job in lane])
        return [[job() for job in trunk], *found]
    finally:
        # Also after a failure: a recording with an open end could not even be ended.
        branches.join()
        _BRANCHES.reset(token)


class StreamBranches:
    """Side streams of whichever stream is current, whose work the GPU prefers to the trunk's.

    Without that preference small work would queue up behind the blocks of a large launch.
    """

    def __init__(self, number: int | None = None) -> None:
        count = SIDE_STREAMS if number is None else number
        self._streams = [torch.cuda.Stream(priority=-1) for _ in range(count)]
        self._open: list[torch.cuda.Stream] = []

    @contextmanager
    def aside(self, number: int) -> Iterator[None]:
        if not self._streams:
            yield
            return
        stream = self._streams[number % len(self._streams)]
        stream.wait_stream(torch.cuda.current_stream())
        self._open.append(stream)
        with torch.cuda.stream(stream):
            yield

    def join(self) -> None:
        for stream in self._open:
            torch.cuda.current_stream().wait_stream(stream)
        self._open = []
