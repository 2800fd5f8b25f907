"""Small work beside large work while a CUDA graph is recorded.

A few launches of settling keep the GPU busy for long; a hundred others are over before they have
filled it. The two kinds do not wait for each other, so the small ones can run in the gaps that the
large ones leave. In a recorded graph that costs nothing: the streams only say what waits for what.
Outside a recording everything runs on one stream, one job after the other, with the same results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Protocol, TypeVar

import torch

# RandomStreams beside the main one, which is the one that is recorded. With none, it does all work.
NUM_SIDE_STREAMS = 2
Result = TypeVar("Result")
Lane = Sequence[Callable[[], Result]]


class SideStreams(Protocol):
    """RandomStreams of work beside the current one, the main stream."""

    def aside(self, number: int) -> AbstractContextManager[None]:
        """Inside, work goes to a side stream, after all that the main stream was asked for."""
        ...

    def join(self) -> None:
        """Have whatever the main stream is asked for from now on wait for all side streams."""
        ...


_SIDE_STREAMS: ContextVar[SideStreams | None] = ContextVar("_SIDE_STREAMS", default=None)


@contextmanager
def using_side_streams(streams: SideStreams) -> Iterator[None]:
    """Let `side_by_side` use these streams inside."""
    token = _SIDE_STREAMS.set(streams)
    try:
        yield
    finally:
        _SIDE_STREAMS.reset(token)


def side_by_side(main: Lane[Result], *sides: Lane[Result]) -> list[list[Result]]:
    """The results of every job, lane by lane, the main one first.

    The jobs of a lane run in order. No job may read or write what a job of another lane writes.
    Large work belongs on the main lane, because the sides are given precedence.

    Freed memory goes back to the stream it was taken on, and that stream may hand it out again at
    once, while another stream still reads it. So whatever crosses streams must be held until all
    have joined. Jobs hold what they read; this function holds what they return. Inside a job there
    is one stream.
    """
    streams = _SIDE_STREAMS.get()
    if streams is None or not any(sides):
        return [[job() for job in lane] for lane in (main, *sides)]
    token = _SIDE_STREAMS.set(None)
    try:
        found: list[list[Result]] = []
        for number, lane in enumerate(sides):
            with streams.aside(number):
                found.append([job() for job in lane])
        return [[job() for job in main], *found]
    finally:
        # Also after a failure: a recording whose streams have not joined cannot even be ended.
        streams.join()
        _SIDE_STREAMS.reset(token)


class CudaSideStreams:
    """Side streams of whichever stream is current, with a higher priority than that.

    Without the priority, small work would queue behind the blocks of a large launch.
    """

    def __init__(self, number: int | None = None) -> None:
        count = NUM_SIDE_STREAMS if number is None else number
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
