"""Half-precision copies of linear layers' parameters for one forward under autocast.

Autocast would cast each weight when its layer is called, one operation after the other. Here all
of them are cast together when the forward begins: the same numbers, two operations instead of
hundreds. A weight whose rows do not fill whole blocks (a vocabulary of 50,257) gets rows of zeros
added, because matrix products of odd size run several times slower on tensor cores.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from shuffled_dpsgd.clipping.rules.base import Slot
from shuffled_dpsgd.clipping.rules.linear import LinearSlot

_ALIGNMENT = 64
_ROW_BLOCK = 128
# Fewer rows than this are not worth padding.
_MIN_PADDED_ROWS = 4096


class HalfCopies:
    """Casts the parameters of a model's linear layers together."""

    def __init__(self, slots: Iterable[Slot]) -> None:
        self._slots = [slot for slot in slots if isinstance(slot, LinearSlot)]

    def make(self, dtype: torch.dtype) -> dict[int, Tensor]:
        """Fresh copies of the float32 parameters, by the id of the parameter."""
        flat: dict[int, Tensor] = {}
        copies: dict[int, Tensor] = {}
        for slot in self._slots:
            weight, bias = slot.parameters["weight"], slot.parameters["bias"]
            assert weight is not None
            uneven = slot.last_rows_uneven(_ROW_BLOCK, _MIN_PADDED_ROWS)
            if weight.dtype is torch.float32 and uneven:
                copies[id(weight)] = _with_zero_rows(weight, dtype)
                if bias is not None:
                    copies[id(bias)] = _with_zero_rows(bias, dtype)
                continue
            for parameter in (weight, bias):
                if parameter is not None and parameter.dtype is torch.float32:
                    flat[id(parameter)] = parameter.detach()
        copies.update(zip(flat, _cast_together(list(flat.values()), dtype), strict=True))
        return copies


def _with_zero_rows(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    rows = -(-tensor.shape[0] // _ROW_BLOCK) * _ROW_BLOCK
    padded = tensor.new_empty((rows, *tensor.shape[1:]), dtype=dtype, requires_grad=False)
    padded[: tensor.shape[0]].copy_(tensor.detach())
    padded[tensor.shape[0] :].zero_()
    return padded


def _cast_together(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    if not tensors:
        return []
    padded = [-(-tensor.numel() // _ALIGNMENT) * _ALIGNMENT for tensor in tensors]
    buffer = tensors[0].new_empty(sum(padded), dtype=dtype)
    copies = [
        part[: tensor.numel()].view(tensor.shape)
        for tensor, part in zip(tensors, buffer.split(padded), strict=True)
    ]
    torch._foreach_copy_(copies, list(tensors))
    return copies
