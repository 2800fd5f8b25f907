"""Copies of many tensors at once, in one launch where Triton can make them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shuffled_dpsgd.clipping.kernels import dispatch
from shuffled_dpsgd.clipping.kernels.alignment import ROW_ALIGNMENT_BYTES


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """`target.copy_(source)` of every pair; all targets are of one type and device."""
    if not targets:
        return
    if targets[0].dtype in dispatch.HALF and all(map(_fits, targets, sources)):
        dispatch.triton("casts").copy_all(targets, sources)
    else:
        torch._foreach_copy_(list(targets), list(sources))


def _fits(target: Tensor, source: Tensor) -> bool:
    return (
        source.is_cuda
        and source.dtype is torch.float32
        and target.dtype in dispatch.HALF
        and source.is_contiguous()
        and target.is_contiguous()
        and source.data_ptr() % ROW_ALIGNMENT_BYTES == 0
        and target.data_ptr() % ROW_ALIGNMENT_BYTES == 0
        and dispatch.triton_available()
    )
