"""Book-keeping from inside a compiled backward, through one opaque operator.

`torch.compile` traces the slots' functions like any other code; only what leaves the graph needs
an operator it does not look into. The operator returns a zero that becomes the gradient of the
recorder's tap, so the compiler cannot drop a call; the number of the call keeps it from merging
two of one layer on one input; and it is marked unsafe for CUDA graphs, whose replay would skip it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from shuffled_dpsgd.clipping import kernels


class Sink:
    """Receives (slot index, part, tensors) from compiled backwards; found by its integer handle."""

    def __init__(self, receive: Callable[[int, int, list[Tensor]], None]) -> None:
        self.receive = receive
        self.handle = max(_SINKS, default=0) + 1
        _SINKS[self.handle] = self


_SINKS: WeakValueDictionary[int, Sink] = WeakValueDictionary()


@torch.library.custom_op(
    "shuffled_dpsgd::record",
    mutates_args=(),
    tags=(torch.Tag.cudagraph_unsafe,),
)
def record(handle: int, slot: int, part: int, call: int, tensors: Sequence[Tensor]) -> Tensor:
    # The compiler may reuse the tensors' memory as soon as this returns, hence the copies.
    _SINKS[handle].receive(slot, part, [kernels.aligned_copy(tensor) for tensor in tensors])
    return tensors[-1].new_zeros((), dtype=torch.float32)


@record.register_fake
def _(handle: int, slot: int, part: int, call: int, tensors: Sequence[Tensor]) -> Tensor:
    return tensors[-1].new_empty((), dtype=torch.float32)
