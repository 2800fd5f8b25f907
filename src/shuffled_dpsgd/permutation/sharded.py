"""Move tensors whose rows are spread over ranks, without gathering any of them.

Columns move where they lie. A row travels to the rank that owns its new place: every rank knows the
whole permutation, so each works out by itself what to send to whom, and one all-to-all moves the
rows of many parameters together with those of their optimizer state. Collective: every rank moves
the same tensors in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shuffled_dpsgd.permutation.drawing import Permutation
from shuffled_dpsgd.runtime.shards import RowAxis, RowSplit, held

# Rows are sent together up to this many bytes, or a tensor by itself where it has more.
_TOGETHER = 1 << 28
Named = tuple[str, Tensor]
Gather = Callable[[Tensor, Sequence[tuple[int, Tensor]]], None]


def move(permutation: Permutation, tensors: Sequence[Named], gather_: Gather) -> None:
    """Permute sharded tensors in place; `gather_` moves along the axes that a rank holds whole.

    Tensors of one parameter must follow each other.
    """
    transfers: dict[tuple[int, int], RowTransfer] = {}
    waiting: list[tuple[Tensor, RowTransfer]] = []
    room = _TOGETHER
    for name, tensor in tensors:
        part, spread = held(tensor).detach(), RowAxis.of(tensor)
        assert spread.ranks is not None, "refused before"
        indices = permutation.to(part.device).indices
        axes = permutation.spec.axes_of[name]
        columns = [(axis, indices[layout]) for axis, layout in axes if axis > 0]
        if columns and part.numel():
            gather_(part, columns)
        for layout in [layout for axis, layout in axes if axis == 0]:
            split = RowSplit(rows=tensor.shape[0], ranks=spread.ranks)
            key = layout, split.rows
            if key not in transfers:
                transfers[key] = find_transfer(indices[layout], split, spread.rank)
            # As many as on any rank, so that all ranks divide the tensors alike.
            size = split.per_rank * tensor.shape[1:].numel() * tensor.element_size()
            if waiting and size > room:
                send_rows(waiting, spread.group)
                waiting, room = [], _TOGETHER
            waiting.append((part, transfers[key]))
            room -= size
    if waiting:
        send_rows(waiting, RowAxis.of(tensors[0][1]).group)


@dataclass(frozen=True, kw_only=True)
class RowTransfer:
    """The rows a rank sends, by receiver, and where it puts those it gets; with counts by rank."""

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


def send_rows(moving: Sequence[tuple[Tensor, RowTransfer]], group: Any) -> None:
    """Exchange the rows of several tensors, of any types, as bytes in one message to each rank."""
    rows = [_as_bytes(part.index_select(0, transfer.sent)) for part, transfer in moving]
    widths = [row.shape[1] for row in rows]
    transfers = [transfer for _, transfer in moving]
    ranks = range(len(transfers[0].sent_to))

    def sizes(counts: Sequence[Sequence[int]]) -> list[list[int]]:
        """Bytes of every tensor by rank."""
        return [[c[r] * w for c, w in zip(counts, widths, strict=True)] for r in ranks]

    leaving_in = sizes([transfer.sent_to for transfer in transfers])
    arriving_in = sizes([transfer.got_from for transfer in transfers])
    by_tensor = [row.split(t.sent_to) for row, t in zip(rows, transfers, strict=True)]
    leaving = torch.cat([parts[r].reshape(-1) for r in ranks for parts in by_tensor])
    arriving = leaving.new_empty(sum(map(sum, arriving_in)))
    dist.all_to_all_single(
        arriving, leaving, [*map(sum, arriving_in)], [*map(sum, leaving_in)], group=group
    )
    found = arriving.split([size for given in arriving_in for size in given])
    for number, (part, transfer) in enumerate(moving):
        own = torch.cat(found[number :: len(moving)])
        values = own.view(part.dtype).view(-1, *part.shape[1:])
        part.index_copy_(0, transfer.arriving_at, values)


def _as_bytes(rows: Tensor) -> Tensor:
    """(rows, bytes) of a tensor with any number of axes."""
    flat = rows.unsqueeze(1) if rows.dim() == 1 else rows.flatten(1)
    return flat.contiguous().view(torch.uint8)
