"""Settling by replay: the launches of one backward, repeated as a whole for the next one like it.

Settling a backward takes a hundred small operations. Launching them one by one takes longer than
running them. A CUDA graph launches them all at once. It reads and writes fixed addresses, and the
allocator tends to give a step's tensors the addresses of the step before. So work is recorded under
the *places* of all it reads and writes, and replayed only if every one of them is the same. All
other work is done the ordinary way.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from operator import attrgetter
from typing import Any, NamedTuple, Protocol, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor

from shuffled_dpsgd.clipping.capture.captures import Capture
from shuffled_dpsgd.clipping.kernels.triton.addresses import Tables, holding
from shuffled_dpsgd.runtime import cuda_graphs

# Many, because a step may have dozens of physical batches, and what it keeps of each may shift the
# allocations of the next. Places seen once are kept apart from recordings: batches of other sizes
# may have new places in every step, which must not push recordings out.
MAX_RECORDINGS = MAX_SEEN = 64
Places = tuple[Hashable, ...]
_dtype, _shape = attrgetter("dtype"), attrgetter("shape")
Work = Callable[[], Tensor]
Value = TypeVar("Value")


class RecordedWork(Protocol):
    """Work that can be done again, with the same places."""

    def replay(self) -> Tensor:
        """Do the work; the result is the caller's to keep."""
        ...


class WorkRecorder(Protocol):
    """Records work without doing it; raises `CaptureFailed` where that cannot be."""

    def __call__(self, work: Work) -> RecordedWork: ...


def places_of(
    captures: Iterable[Capture], others: Iterable[Tensor | None], *constants: Hashable
) -> Places:
    """All that a recorded launch depends on: where tensors lie and how, and the constants."""
    # One flat tuple, mostly filled by C code: this runs between backward and step, in every step.
    kinds: list[Hashable] = [*constants]
    tensors: list[Tensor] = []
    for capture in captures:
        found = capture.tensors()
        kinds += (capture.kind, len(found))
        tensors += found
    for tensor in others:
        kinds.append(tensor is not None)
        if tensor is not None:
            tensors.append(tensor)
    return (
        *kinds,
        *map(Tensor.data_ptr, tensors),
        *map(_dtype, tensors),
        *map(_shape, tensors),
        *map(Tensor.stride, tensors),
    )


class _Recorded(NamedTuple):
    """A recording, and the tables of addresses that it reads."""

    recording: RecordedWork
    tables: Tables


class Replays:
    """Does work, from a recording where its places have been seen before.

    The first time, work is done as it is; the second time it is recorded. `record` is replaced in
    tests. Should recording fail, a warning says so and the engine goes on without.
    """

    def __init__(self, record: WorkRecorder | None = None) -> None:
        self._record = record if record is not None else GraphRecorder()
        self._seen: OrderedDict[Places, Tables] = OrderedDict()
        self._recorded: OrderedDict[Places, _Recorded] = OrderedDict()
        self.enabled = cuda_graphs.may_record()
        self.replayed = 0

    def run(self, places: Places | None, work: Work) -> Tensor:
        """The result of `work`, which must depend on nothing but `places`."""
        if places is None or not self.enabled:
            return work()
        found = self._recorded.get(places)
        if found is not None:
            self._recorded.move_to_end(places)
        else:
            tables = self._seen.pop(places, None)
            if tables is None:
                tables = _added(self._seen, places, {}, MAX_SEEN)
                with holding(tables):
                    return work()
            try:
                with holding(tables):
                    recording = self._record(work)
            except cuda_graphs.CaptureFailed as error:
                self._give_up(error)
                return work()
            made = _Recorded(recording, tables)
            found = _added(self._recorded, places, made, MAX_RECORDINGS)
        self.replayed += 1
        return found.recording.replay()

    def _give_up(self, error: cuda_graphs.CaptureFailed) -> None:
        self.enabled = False
        self._seen.clear()
        self._recorded.clear()
        cuda_graphs.warn_unrecorded("Clipping", error)


def _added(kept: OrderedDict[Places, Value], places: Places, value: Value, at_most: int) -> Value:
    """Put the value last and return it; drop the first if there are too many."""
    kept[places] = value
    if len(kept) > at_most:
        kept.popitem(last=False)
    return value


class GraphRecorder:
    """Records work as CUDA graphs that share one pool of memory.

    Sharing is safe because no two of them run at once and each result is copied out. A pool dies
    with the last graph that uses it, so the next one gets another.
    """

    def __init__(self) -> None:
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None
        self._alive: WeakSet[RecordedGraph] = WeakSet()

    def __call__(self, work: Work) -> RecordedWork:
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        if not self._alive:
            self._pool = torch.cuda.graph_pool_handle()
        self._stream.wait_stream(torch.cuda.current_stream())
        graph, result = cuda_graphs.capture(work, self._stream, pool=self._pool)
        torch.cuda.current_stream().wait_stream(self._stream)
        recording = RecordedGraph(graph, result)
        self._alive.add(recording)
        return recording


class RecordedGraph:
    """A CUDA graph and the tensor its result lies in."""

    def __init__(self, graph: torch.cuda.CUDAGraph, result: Tensor) -> None:
        self._graph = graph
        self._result = result

    def replay(self) -> Tensor:
        self._graph.replay()
        return self._result.clone()
