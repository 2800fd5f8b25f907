"""Copies of many tensors at once, in one launch where Triton serves."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shuffled_dpsgd.clipping.kernels import choices
from shuffled_dpsgd.clipping.kernels.alignment import ROW_ALIGNMENT_BYTES


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """`target.copy_(source)` of every pair; all targets are of one type and device."""
    if not targets:
        return
    device = targets[0].device
    if all(map(_fits, targets, sources)) and choices.may_take(choices.CASTS, device):
        choices.module("triton.casts").copy_all(targets, sources)
    else:
        torch._foreach_copy_(list(targets), list(sources))


def _fits(target: Tensor, source: Tensor) -> bool:
    return (
        source.is_cuda
        and source.dtype is torch.float32
        and target.dtype in choices.HALF
        and source.is_contiguous()
        and target.is_contiguous()
        and source.data_ptr() % ROW_ALIGNMENT_BYTES == 0
        and target.data_ptr() % ROW_ALIGNMENT_BYTES == 0
    )
