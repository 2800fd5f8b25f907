"""Book-keeping from inside a compiled backward, through one opaque operator.

`torch.compile` traces the slots' functions like any other code. Only what leaves the graph needs an
operator that the compiler does not look into. Three things keep the compiler from losing a call:

- The operator returns a scalar, which becomes the gradient of the recorder's anchor. Nobody reads
  it, but without it the call would be dropped.
- The number of the call keeps two calls of one layer on one input from being merged.
- The operator is marked unsafe for CUDA graphs, because a replay would skip it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, cast
from weakref import ReferenceType, finalize, ref

import torch
from torch import Tensor

from shuffled_dpsgd.clipping.kernels import choices


class Sink(Protocol):
    """Where captures of compiled backwards go; found by its integer handle."""

    def record_traced(self, index: int, part: int, call: int, tensors: list[Tensor]) -> None:
        """Take the tensors that the operator was given for one call of one slot."""
        ...


# Not a `WeakValueDictionary`, whose Python a compiler would have to trace.
_SINKS: dict[int, ReferenceType[Sink]] = {}


def add_sink(sink: Sink) -> int:
    """A handle under which the sink is found as long as somebody else keeps it."""
    handle = max(_SINKS, default=0) + 1
    _SINKS[handle] = ref(sink)
    finalize(sink, _SINKS.pop, handle)
    return handle


def find_sink(handle: int) -> Sink:
    """The sink of a handle, which lives as long as its engine."""
    sink = _SINKS[handle]()
    assert sink is not None
    return sink


# Defined by hand: `torch.library.custom_op` adds checks that cost more than the operator itself.
_LIBRARY = torch.library.Library("shuffled_dpsgd", "DEF")
_LIBRARY.define(
    "record(int handle, int slot, int part, int call, Tensor[] tensors) -> Tensor",
    tags=(torch.Tag.cudagraph_unsafe, torch.Tag.needs_fixed_stride_order),
)


def _record(handle: int, slot: int, part: int, call: int, tensors: Sequence[Tensor]) -> Tensor:
    # The compiler may reuse the tensors' memory as soon as this returns, hence the copies.
    copies = [choices.aligned_copy(tensor) for tensor in tensors]
    find_sink(handle).record_traced(slot, part, call, copies)
    return _record_fake(handle, slot, part, call, tensors)


def _record_fake(handle: int, slot: int, part: int, call: int, tensors: Sequence[Tensor]) -> Tensor:
    """A scalar nobody reads."""
    return tensors[-1].new_empty((), dtype=torch.float32)


_LIBRARY.impl("record", _record, "CompositeExplicitAutograd")
torch.library.register_fake("shuffled_dpsgd::record", _record_fake, lib=_LIBRARY)


def record(handle: int, slot: int, part: int, call: int, tensors: Sequence[Tensor]) -> Tensor:
    """Hand tensors to the sink of a handle, from inside a traced backward."""
    return cast(Tensor, torch.ops.shuffled_dpsgd.record.default(handle, slot, part, call, tensors))
