"""Embedding tables, with repeated tokens, padding rows and ids broadcast over the batch.

Shapes: B samples, T positions, D the width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shuffled_dpsgd.clipping.capture.captures import Capture, InputAndGradient
from shuffled_dpsgd.clipping.capture.slot import Slot, enter, recorder_of, size_of
from shuffled_dpsgd.clipping.contributions.kinds import Contribution, RowsGrad
from shuffled_dpsgd.errors import UnsupportedModuleError

if TYPE_CHECKING:
    from shuffled_dpsgd.clipping.capture.batch import CapturedBatch


class EmbeddingFunction(torch.autograd.Function):
    """F.embedding whose backward records (ids, output gradient) and touches no table."""

    @staticmethod
    def forward(
        ctx: Any,
        ids: Tensor,
        weight: Tensor,
        slot: EmbeddingSlot,
        batch: CapturedBatch,
        anchor: Tensor,
    ) -> Tensor:
        ctx.slot, ctx.batch = slot, batch
        ctx.save_for_backward(ids)
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        (ids,) = ctx.saved_tensors
        anchor = recorder_of(ctx.slot).record(ctx.batch, ctx.slot, (ids, g))
        return None, None, None, None, anchor


class EmbeddingSlot(Slot):
    """An embedding table."""

    kind = "embedding"
    may_fold = True
    fixed_backend = "gram"

    def __init__(self, **site: Any) -> None:
        super().__init__(**site)
        table = cast(nn.Embedding, self.module)
        if table.max_norm is not None or table.scale_grad_by_freq:
            raise UnsupportedModuleError(
                self.path,
                expected="a table whose gradient belongs to single samples",
                got="max_norm or scale_grad_by_freq, which mix the samples of a batch",
                remedy="set max_norm=None and scale_grad_by_freq=False",
            )
        self.padding_idx = table.padding_idx

    def forward(self, input: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return cast(Tensor, self.plain(input))
        return self.look_up(input)

    def look_up(self, ids: Tensor) -> Tensor:
        """Rows of the table, one set per sample, with book-keeping in the backward."""
        batch, listens, recorder = enter(self)
        size = batch.size if listens else size_of(batch)
        shared_by_batch = self.layout.shared_by_batch
        # All rows share these positions, and a sample has several rows: look up once for each.
        is_shared = shared_by_batch or (ids.dim() > 1 and ids.shape[0] == 1)
        folds = batch.rows_per_sample > 1 and is_shared and not self.layout.folded
        if folds:
            shared = ids if shared_by_batch else ids[0]
            ids = shared.expand(size, batch.rows_per_sample, *shared.shape)
        elif shared_by_batch or ids.dim() < 2 or ids.shape[0] != size:
            ids = self._over_batch(ids, size)
        weight = self.parameters["weight"]
        found = cast(Tensor, EmbeddingFunction.apply(ids, weight, self, batch, recorder.anchor))
        return found.flatten(0, 1) if folds else found

    def _over_batch(self, ids: Tensor, size: int) -> Tensor:
        """Ids with the batch on axis 0, from ids that all samples share or that have few axes."""
        if self.layout.shared_by_batch or (ids.dim() == 1 and ids.shape[0] != size):
            return ids.expand(size, *ids.shape)
        if ids.dim() == 1 and torch.compiler.is_compiling() and not self.recorder.axis_checked:
            raise UnsupportedModuleError(
                self.path,
                expected="ids known to be one per sample",
                got=f"ids of shape {tuple(ids.shape)}, which may as well be positions",
                remedy="run one batch without torch.compile first, or use ids of shape (B, 1)",
            )
        return self.over_batch(ids, size) if ids.dim() else ids.expand(size)

    def contributions(self, capture: Capture) -> list[tuple[str, Contribution]]:
        assert isinstance(capture, InputAndGradient)
        ids, g = cast(Tensor, capture.x), capture.g
        B = ids.shape[0]
        rows = RowsGrad(
            ids_BT=ids.reshape(B, -1),
            grad_BTD=g.reshape(B, -1, g.shape[-1]),
            padding_idx=self.padding_idx,
        )
        return [(self.names["weight"], rows)]


class ScaledEmbeddingSlot(EmbeddingSlot):
    """Hugging Face's tables whose rows are multiplied by a constant (Gemma, BART)."""

    def forward(self, input_ids: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return cast(Tensor, self.plain(input_ids))
        rows = self.look_up(input_ids)
        scale = cast(Any, self.module).embed_scale
        return rows * (scale.to(rows.dtype) if isinstance(scale, Tensor) else scale)


class OwnLookups(TorchFunctionMode):
    """Keeps what `F.embedding` promises about gradients, which vmap ignores."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        look_up = _look_up if func is F.embedding else func
        return look_up(*args, **(kwargs or {}))


def _look_up(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """`F.embedding`, whose padding row gets no gradient."""
    if max_norm is not None or scale_grad_by_freq:
        raise ValueError("max_norm and scale_grad_by_freq mix the samples of a batch")
    found = F.embedding(input, weight)
    if padding_idx is None:
        return found
    is_padding = (input == padding_idx % weight.shape[0]).unsqueeze(-1)
    return torch.where(is_padding, found.detach(), found)
