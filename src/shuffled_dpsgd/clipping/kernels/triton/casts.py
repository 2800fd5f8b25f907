"""Half-precision copies of many tensors in a single launch.

Tensors of any lengths are cut into blocks; a table says of which tensor each block is and where
in it the block begins.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from shuffled_dpsgd.clipping.kernels.triton.addresses import address_table
from shuffled_dpsgd.clipping.kernels.triton.linear import ELEMENT, tile_at

BLOCK = 4096


@triton.jit
def cast_kernel(  # type: ignore[no-untyped-def]
    sources, targets, lengths, tensor_of_block, first_of_block,
    BLOCK: tl.constexpr, ELEMENT: tl.constexpr,
):  # fmt: skip
    """One block of one tensor, rounded to nearest."""
    tensor = tl.load(tensor_of_block + tl.program_id(0))
    at = tl.load(first_of_block + tl.program_id(0)) + tl.arange(0, BLOCK)
    inside = at < tl.load(lengths + tensor)
    values = tl.load(tile_at(sources, tensor, tl.float32) + at, mask=inside)
    tl.store(
        tile_at(targets, tensor, ELEMENT) + at,
        values.to(ELEMENT, fp_downcast_rounding="rtne"),
        mask=inside,
    )


@functools.lru_cache(maxsize=16)
def blocks(lengths: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """The tensors' lengths, and of every block its tensor and its first element."""
    counts = torch.tensor([-(-length // BLOCK) for length in lengths])
    tensor_of_block = torch.arange(len(lengths)).repeat_interleave(counts)
    before = (counts.cumsum(0) - counts)[tensor_of_block]
    first_of_block = (torch.arange(len(tensor_of_block)) - before) * BLOCK
    found = (torch.tensor(lengths), tensor_of_block, first_of_block)
    lengths_L, tensors_N, firsts_N = (table.to(device) for table in found)
    return lengths_L, tensors_N, firsts_N


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy float32 `sources` into half-precision `targets`; all contiguous and 16-byte aligned."""
    device = sources[0].device
    addresses = address_table((sources, targets), device)
    lengths, tensors, firsts = blocks(tuple([source.numel() for source in sources]), device)
    cast_kernel[(len(tensors),)](
        addresses[0], addresses[1], lengths, tensors, firsts,
        BLOCK=BLOCK, ELEMENT=ELEMENT[targets[0].dtype], num_warps=8,
    )  # fmt: skip
