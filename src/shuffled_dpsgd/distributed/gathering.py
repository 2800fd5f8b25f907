"""Whole tensors from the rows that the ranks hold of them.

By the collective that every backend serves. `DTensor.full_tensor` is not used: with gloo and CUDA
tensors, as two processes on one GPU have them, it ends in a segmentation fault in PyTorch 2.11.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shuffled_dpsgd.distributed.world import World
from shuffled_dpsgd.runtime.shards import RowSplit, held, is_sharded


def gather_whole(world: World, tensor: Tensor) -> Tensor:
    """All of a tensor, wherever its rows lie; itself where it is not spread. Collective."""
    if not is_sharded(tensor):
        return tensor
    (found,) = gather_together(world, [tensor], tensor.dtype)
    return found


def gather_together(world: World, shards: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """All of several sharded tensors, sent at once in `dtype`. Collective.

    Beside the result there is a copy of it for a moment, unless it is a single tensor.
    """
    splits = [RowSplit(rows=shard.shape[0], ranks=world.size) for shard in shards]
    widths = [
        split.per_rank * shard.shape[1:].numel()
        for split, shard in zip(splits, shards, strict=True)
    ]
    pieces = torch.empty(world.size, sum(widths), dtype=dtype, device=held(shards[0]).device)
    parts = pieces.split(widths, dim=1)
    for shard, part in zip(shards, parts, strict=True):
        rows = held(shard).detach().reshape(-1)
        part[world.rank, : rows.numel()] = rows
    world.gather_pieces_(pieces.view(-1))
    return [
        part.reshape(-1)[: shard.shape.numel()].view(shard.shape)
        for shard, part in zip(shards, parts, strict=True)
    ]
