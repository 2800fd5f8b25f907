"""Embedding tables, with repeated tokens, padding rows and ids broadcast over the batch.

Shapes: B samples, T positions, D the width.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shuffled_dpsgd.clipping.captures import Contribution, RowsGrad
from shuffled_dpsgd.clipping.rules.base import Saved, Slot
from shuffled_dpsgd.errors import UnsupportedModuleError

if TYPE_CHECKING:
    from shuffled_dpsgd.clipping.batch import Batch


class EmbeddingFunction(torch.autograd.Function):
    """F.embedding whose backward records (ids, output gradient) and touches no table."""

    @staticmethod
    def forward(
        ctx: Any, ids: Tensor, weight: Tensor, tap: Tensor, slot: EmbeddingSlot, batch: Batch
    ) -> Tensor:
        ctx.slot, ctx.batch = slot, batch
        ctx.save_for_backward(ids)
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        tap = ctx.slot.recorder.record(ctx.batch, ctx.slot, (ctx.saved_tensors[0], g))
        return None, None, tap, None, None


class EmbeddingSlot(Slot):
    """An embedding table."""

    kind = "embedding"
    fixed_route = "gram"

    def __init__(self, **site: Any) -> None:
        super().__init__(**site)
        table = cast(nn.Embedding, self.module)
        if table.max_norm is not None or table.scale_grad_by_freq:
            raise UnsupportedModuleError(
                self.path,
                expected="a table whose gradient belongs to single samples",
                got="max_norm or scale_grad_by_freq, which mix the samples of a batch",
                remedy="set max_norm=None and scale_grad_by_freq=False, or freeze the table",
            )
        self.padding_idx = table.padding_idx
        self.weight_name = self.names["weight"]

    def forward(self, ids: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return cast(Tensor, self.plain(ids))
        batch = self.batch()
        if ids.shape[0] != batch.size:
            ids = self.over_batch(ids, batch.size)
        weight, tap = self.parameters["weight"], self.recorder.tap
        return cast(Tensor, EmbeddingFunction.apply(ids, weight, tap, self, batch))

    def contributions(self, saved: Saved) -> Iterator[tuple[str, Contribution]]:
        ids, g = saved
        B = ids.shape[0]
        yield (
            self.weight_name,
            RowsGrad(
                ids_BT=ids.reshape(B, -1),
                grad_BTD=g.reshape(B, -1, g.shape[-1]),
                padding_idx=self.padding_idx,
            ),
        )
