"""Move tensors whose rows are spread over ranks, without gathering any of them.

Columns move where they lie. A row travels to the rank that owns its new place: every rank knows the
whole permutation, so each works out by itself what to send to whom, and one all-to-all moves the
rows of a parameter together with those of its optimizer state. Collective: every rank moves the
same tensors in the same order. Memory beyond the shards is twice that of one parameter's shard.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shuffled_dpsgd.permutation.drawing import Permutation
from shuffled_dpsgd.runtime.shards import RowAxis, RowSplit, held

Named = tuple[str, Tensor]
Gather = Callable[[Tensor, Sequence[tuple[int, Tensor]]], None]


def move(permutation: Permutation, tensors: Sequence[Named], gather_: Gather) -> None:
    """Permute sharded tensors in place; `gather_` moves along the axes that a rank holds whole.

    Tensors of one parameter must follow each other.
    """
    transfers: dict[tuple[int, int], RowTransfer] = {}
    for name, named in groupby(tensors, key=itemgetter(0)):
        together = [tensor for _, tensor in named]
        parts = [held(tensor).detach() for tensor in together]
        indices = permutation.to(parts[0].device).indices
        axes = permutation.spec.axes_of[name]
        columns = [(axis, indices[layout]) for axis, layout in axes if axis > 0]
        if columns:
            for part in parts:
                if part.numel():
                    gather_(part, columns)
        for layout in [layout for axis, layout in axes if axis == 0]:
            spread = RowAxis.of(together[0])
            assert spread.ranks is not None, "refused before"
            split = RowSplit(rows=together[0].shape[0], ranks=spread.ranks)
            key = layout, split.rows
            if key not in transfers:
                transfers[key] = find_transfer(indices[layout], split, spread.rank)
            send_rows(parts, transfers[key], spread.group)


@dataclass(frozen=True, kw_only=True)
class RowTransfer:
    """Which of its rows a rank sends, in order of their receivers, and where it puts those it gets.

    `sent_to` and `got_from` count rows by rank, those that stay included.
    """

    sent: Tensor
    sent_to: list[int]
    arriving_at: Tensor
    got_from: list[int]


def find_transfer(index: Tensor, split: RowSplit, rank: int) -> RowTransfer:
    """The part of one rank in a move after which row i of the whole is what row index[i] was.

    >>> transfer = find_transfer(torch.tensor([3, 0, 2, 1]), RowSplit(rows=4, ranks=2), rank=0)
    >>> transfer.sent.tolist(), transfer.sent_to, transfer.arriving_at.tolist(), transfer.got_from
    ([0, 1], [1, 1], [1, 0], [1, 1])
    """
    low, high = split.span(rank)
    owners = torch.div(index, split.per_rank, rounding_mode="floor")
    leaving = (owners == rank).nonzero().flatten()
    receivers = torch.div(leaving, split.per_rank, rounding_mode="floor")
    givers = owners[low:high]
    return RowTransfer(
        sent=index[leaving].long() - low,
        sent_to=torch.bincount(receivers, minlength=split.ranks).tolist(),
        arriving_at=torch.argsort(givers, stable=True),
        got_from=torch.bincount(givers, minlength=split.ranks).tolist(),
    )


def send_rows(parts: Sequence[Tensor], transfer: RowTransfer, group: Any) -> None:
    """Exchange the rows of several tensors, of any types, as bytes side by side."""
    rows = [_as_bytes(part.index_select(0, transfer.sent)) for part in parts]
    widths = [row.shape[1] for row in rows]
    leaving = torch.cat(rows, dim=1)
    arriving = leaving.new_empty(len(transfer.arriving_at), sum(widths))
    dist.all_to_all_single(arriving, leaving, transfer.got_from, transfer.sent_to, group=group)
    for part, found in zip(parts, arriving.split(widths, dim=1), strict=True):
        values = found.contiguous().view(part.dtype).view(-1, *part.shape[1:])
        part.index_copy_(0, transfer.arriving_at, values)


def _as_bytes(rows: Tensor) -> Tensor:
    """(rows, bytes) of a tensor with any number of axes."""
    flat = rows.unsqueeze(1) if rows.dim() == 1 else rows.flatten(1)
    return flat.contiguous().view(torch.uint8)
