"""Rows that matrix kernels can read in wide words: which tensors have them, and how to get them."""

from __future__ import annotations

import torch
from torch import Tensor

ROW_ALIGNMENT_BYTES = 16
# A whole number of the blocks the matrix kernels read.
ROW_ROOM = 128
# Narrower rows are too small a product for matrix units.
MIN_WIDTH = 16


def aligned(tensor: Tensor) -> bool:
    """Whether every row starts at a multiple of 16 bytes and its elements lie side by side."""
    return (
        tensor.stride(-1) == 1
        and tensor.data_ptr() % ROW_ALIGNMENT_BYTES == 0
        and all(
            stride * tensor.element_size() % ROW_ALIGNMENT_BYTES == 0
            for stride in tensor.stride()[:-1]
        )
    )


def aligned_copy(tensor: Tensor) -> Tensor:
    """A copy whose rows are aligned, with unused room at their ends where that takes some.

    Rows of odd length keep both Triton's and the vendor's matrix kernels from wide loads.
    """
    step = ROW_ALIGNMENT_BYTES // tensor.element_size()
    width = tensor.shape[-1] if tensor.dim() else step
    if not tensor.is_cuda or width < MIN_WIDTH or width % step == 0:
        return tensor.clone(memory_format=torch.contiguous_format)
    room = -(-width // ROW_ROOM) * ROW_ROOM
    copy = tensor.new_empty((*tensor.shape[:-1], room))[..., :width]
    return copy.copy_(tensor)
