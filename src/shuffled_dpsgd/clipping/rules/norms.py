"""Normalisation layers: their per-sample gradients are as small as the layer, so they are kept.

Shapes: B samples, T positions, D the normalised width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from shuffled_dpsgd.clipping import kernels
from shuffled_dpsgd.clipping.captures import Contribution, DenseGrad
from shuffled_dpsgd.clipping.rules.base import Saved, Slot

if TYPE_CHECKING:
    from shuffled_dpsgd.clipping.batch import Batch


class LayerNormFunction(torch.autograd.Function):
    """Layer norm whose backward records the per-sample gradients of weight and bias."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        slot: LayerNormSlot,
        batch: Batch,
    ) -> Tensor:
        y, mean, rstd = torch.native_layer_norm(x, slot.normalized_shape, weight, bias, slot.eps)
        ctx.slot, ctx.batch = slot, batch
        ctx.save_for_backward(x, weight, mean, rstd)
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, weight, mean, rstd = ctx.saved_tensors
        B, D = x.shape[0], ctx.slot.width
        shape = (B, -1, D)
        grad_x, weight_BD, bias_BD = kernels.layer_norm_backward(
            x.reshape(shape),
            g.reshape(shape),
            None if weight is None else weight.view(D),
            mean.view(B, -1, 1),
            rstd.view(B, -1, 1),
            ctx.needs_input_grad[0],
        )
        ctx.slot.recorder.record(ctx.batch, ctx.slot, (weight_BD, bias_BD))
        return None if grad_x is None else grad_x.view(x.shape), None, None, None, None


class NormSlot(Slot):
    """A layer whose trainable parameters are a gain and perhaps an offset."""

    def __init__(self, **site: Any) -> None:
        super().__init__(**site)
        self.weight_name = self.names.get("weight")
        self.bias_name = self.names.get("bias")

    def contributions(self, saved: Saved) -> Iterator[tuple[str, Contribution]]:
        weight_grads, bias_grads = saved
        if self.weight_name is not None:
            yield self.weight_name, DenseGrad(grads_BS=weight_grads)
        if self.bias_name is not None:
            yield self.bias_name, DenseGrad(grads_BS=bias_grads)


class LayerNormSlot(NormSlot):
    """`nn.LayerNorm` over any number of trailing axes."""

    kind = "layer-norm"

    def __init__(self, **site: Any) -> None:
        super().__init__(**site)
        layer = cast(nn.LayerNorm, self.module)
        self.normalized_shape = list(layer.normalized_shape)
        self.width = math.prod(self.normalized_shape)
        self.eps = layer.eps

    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return cast(Tensor, self.plain(x))
        batch = self.batch()
        if x.shape[0] != batch.size:
            x = self.over_batch(x, batch.size)
        if batch.device == "cuda" and torch.is_autocast_enabled("cuda"):
            x = x.float()
        owned = self.parameters
        return cast(
            Tensor,
            LayerNormFunction.apply(x, owned["weight"], owned["bias"], self, batch),
        )
