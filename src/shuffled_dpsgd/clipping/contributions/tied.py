"""Exact joint norms where several contributions meet in one parameter.

A tied head and embedding, or a module called more than once, give one parameter the sum of
several gradients per sample, so the squared norm needs their inner products too. Contributions of
one kind are concatenated along positions, which contains every cross term; head and embedding
have a closed form, and another if the head's gradients are stored; any other mixture is stored and
added.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shuffled_dpsgd.clipping.contributions import cost
from shuffled_dpsgd.clipping.contributions.kinds import (
    Contribution,
    DenseGrad,
    OuterGrad,
    RowsGrad,
    RowSumGrad,
)
from shuffled_dpsgd.clipping.kernels import plain

_ROUNDING_ULPS = 4.0


def joint_sq_norms(
    parts: Sequence[Contribution], shape: torch.Size, choose: cost.Chooser
) -> Tensor:
    """(B,) squared norms of the per-sample sums of `parts`, all of one parameter of `shape`."""
    merged = [*_merge_outers(parts, choose), *_merge_rows(parts), *_merge_dense(parts, shape)]
    if len(merged) == 1:
        return merged[0].sq_norms()
    if len(merged) == 2 and isinstance(merged[0], OuterGrad) and isinstance(merged[1], RowsGrad):
        return _head_and_embedding(merged[0], merged[1])
    if len(merged) == 2 and isinstance(merged[0], RowsGrad) and isinstance(merged[1], DenseGrad):
        return _stored_and_embedding(merged[1], merged[0], shape)
    total = merged[0].stored(shape)
    for part in merged[1:]:
        total = total + part.stored(shape)
    return total.flatten(1).square().sum(1)


def _head_and_embedding(head: OuterGrad, table: RowsGrad) -> Tensor:
    cross_B = plain.tied_cross_terms(
        head.right_BTC, head.left_BTR, table.ids_BT, table.grad_BTD, table.padding_idx
    )
    return _together(head.sq_norms() + table.sq_norms(), cross_B)


def _stored_and_embedding(stored: DenseGrad, table: RowsGrad, shape: torch.Size) -> Tensor:
    cross_B = plain.stored_cross_terms(
        stored.stored(shape), table.ids_BT, table.grad_BTD, table.padding_idx
    )
    own_B = stored.sq_norms() + table.sq_norms()
    return _together(own_B, cross_B.to(own_B.dtype))


def _together(own_B: Tensor, cross_B: Tensor) -> Tensor:
    # The two may cancel. Each was rounded by itself, so the head room is relative to `own_B`.
    rounding = _ROUNDING_ULPS * torch.finfo(own_B.dtype).eps
    return torch.maximum(own_B + 2.0 * cross_B, torch.zeros_like(own_B)) + rounding * own_B


def _merge_outers(parts: Sequence[Contribution], choose: cost.Chooser) -> list[Contribution]:
    outers = [part for part in parts if isinstance(part, OuterGrad)]
    if len(outers) < 2:
        return list(outers)
    left_BTR = torch.cat([part.left_BTR for part in outers], 1)
    right_BTC = torch.cat([part.right_BTC for part in outers], 1)
    # Together they have more positions than each was decided for.
    _, T, R = left_BTR.shape
    backend = choose(T, R, right_BTC.shape[2], left_BTR.device.type)
    return [OuterGrad(left_BTR=left_BTR, right_BTC=right_BTC, backend=backend)]


def _merge_rows(parts: Sequence[Contribution]) -> list[Contribution]:
    merged: list[Contribution] = []
    rows = [part for part in parts if isinstance(part, RowsGrad)]
    if len({part.padding_idx for part in rows}) > 1:
        # Two tables with different padding rows share a weight: drop the padding by value.
        rows = [_without_padding(part) for part in rows]
    if rows:
        merged.append(
            rows[0]
            if len(rows) == 1
            else RowsGrad(
                ids_BT=torch.cat([part.ids_BT for part in rows], 1),
                grad_BTD=torch.cat([part.grad_BTD for part in rows], 1),
                padding_idx=rows[0].padding_idx,
            )
        )
    return merged


def _without_padding(part: RowsGrad) -> RowsGrad:
    if part.padding_idx is None:
        return part
    kept = (part.ids_BT != part.padding_idx).unsqueeze(2)
    grad_BTD = torch.where(kept, part.grad_BTD, 0.0)
    return RowsGrad(ids_BT=part.ids_BT, grad_BTD=grad_BTD, padding_idx=None)


def _merge_dense(parts: Sequence[Contribution], shape: torch.Size) -> list[Contribution]:
    found = [part for part in parts if isinstance(part, DenseGrad | RowSumGrad)]
    if len(found) == 1 and isinstance(found[0], DenseGrad):
        return [found[0]]
    dense = [part.stored(shape) for part in found]
    if not dense:
        return []
    total = dense[0]
    for grads in dense[1:]:
        total = total + grads
    return [DenseGrad(grads_BS=total)]
