"""Normalisation layers, whose per-sample gradients are small enough to be kept.

Shapes: B samples, T positions, D the normalised width, C channels.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shuffled_dpsgd.clipping.capture.captures import Capture, StoredGradients, UnsummedNorm
from shuffled_dpsgd.clipping.capture.slot import Slot, batch_of, enter, recorder_of, size_of
from shuffled_dpsgd.clipping.contributions.kinds import Contribution
from shuffled_dpsgd.clipping.kernels import norm_layers, plain

if TYPE_CHECKING:
    from shuffled_dpsgd.clipping.capture.batch import CapturedBatch


class NormSlot(Slot):
    """A layer whose trainable parameters are a gain and perhaps an offset."""

    def contributions(self, capture: Capture) -> list[tuple[str, Contribution]]:
        if isinstance(capture, UnsummedNorm):
            ((_, sums_LB2D),) = norm_layers.norm_sum_runs(
                [(capture.x_BTD, capture.g_BTD)], [capture.eps]
            )
            capture = self.captured(0, sums_LB2D[0].unbind(1))
        assert isinstance(capture, StoredGradients)
        return capture.contributions(self.weight_name, self.bias_name)

    def captured(self, part: int, tensors: Sequence[Tensor]) -> Capture:
        return StoredGradients(tensors[0], tensors[1] if len(tensors) > 1 else None)


class LayerNormFunction(torch.autograd.Function):
    """Layer norm whose backward records the per-sample gradients of weight and bias."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        slot: LayerNormSlot,
        batch: CapturedBatch,
        anchor: Tensor,
    ) -> Tensor:
        # From the weight if possible: a compiled model checks what it reads from slots in each run.
        shape = slot.normalized_shape if weight is None else weight.shape
        y, mean, rstd = torch.native_layer_norm(x, shape, weight, bias, slot.eps)
        ctx.slot, ctx.batch = slot, batch
        ctx.save_for_backward(x, weight, mean, rstd)
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, weight, mean, rstd = ctx.saved_tensors
        if x.numel() == 0:
            return torch.zeros_like(x), *(None,) * (len(ctx.needs_input_grad) - 1)
        B, D = x.shape[0], ctx.slot.width if weight is None else weight.numel()
        grad_x, weight_BD, bias_BD = plain.layer_norm_backward(
            x.reshape(B, -1, D),
            g.reshape(B, -1, D),
            None if weight is None else weight.view(D),
            mean.view(B, -1, 1),
            rstd.view(B, -1, 1),
            ctx.needs_input_grad[0],
        )
        anchor = recorder_of(ctx.slot).record(ctx.batch, ctx.slot, (weight_BD, bias_BD))
        return None if grad_x is None else grad_x.view(x.shape), None, None, None, None, anchor


class LayerNormSlot(NormSlot):
    """`nn.LayerNorm` over any number of trailing axes."""

    kind = "layer-norm"
    may_fold = True

    def __init__(self, **site: Any) -> None:
        super().__init__(**site)
        layer = cast(nn.LayerNorm, self.module)
        self.normalized_shape = list(layer.normalized_shape)
        self.width = math.prod(self.normalized_shape)
        self.eps = layer.eps

    def forward(self, input: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return cast(Tensor, self.plain(input))
        (batch, listens, recorder), x = enter(self), input
        size = batch.size if listens else size_of(batch)
        if x.shape[0] != size:
            x = self.over_batch(x, size)
        owned = self.parameters
        weight, bias = owned["weight"], owned["bias"]
        if x.requires_grad and listens:
            out = F.layer_norm(
                x,
                self.normalized_shape,
                None if weight is None else weight.detach(),
                None if bias is None else bias.detach(),
                self.eps,
            )
            return self.recorder.listen(out, batch, self, x)
        if batch.device == "cuda" and torch.is_autocast_enabled("cuda"):
            x = x.float()
        out = LayerNormFunction.apply(x, weight, bias, self, batch, recorder.anchor)
        return cast(Tensor, out)

    def heard(self, size: int, x: Tensor | None, g: Tensor) -> Capture:
        assert x is not None
        shape = (x.shape[0], -1, self.width)
        return UnsummedNorm(x_BTD=x.reshape(shape), g_BTD=g.reshape(shape), eps=self.eps)


class GainFunction(torch.autograd.Function):
    """normed · weight (+ bias), recording the per-sample gradients of both."""

    @staticmethod
    def forward(
        ctx: Any,
        normed: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        slot: GainSlot,
        batch: CapturedBatch,
        anchor: Tensor,
    ) -> Tensor:
        ctx.slot, ctx.batch = slot, batch
        ctx.save_for_backward(normed, weight)
        y = slot.spread(weight, normed) * normed
        return y if bias is None else y + slot.spread(bias, normed)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        normed, weight = ctx.saved_tensors
        if normed.numel() == 0:
            return torch.zeros_like(normed), *(None,) * (len(ctx.needs_input_grad) - 1)
        slot = ctx.slot
        wide_g = plain.widen(g)
        weight_grads = slot.per_sample(wide_g * plain.widen(normed))
        bias_grads = None if slot.bias_name is None else slot.per_sample(wide_g)
        anchor = recorder_of(slot).record(ctx.batch, slot, (weight_grads, bias_grads))
        grad = (g * slot.spread(weight, g)).to(normed.dtype) if ctx.needs_input_grad[0] else None
        return grad, None, None, None, None, anchor


class GainSlot(NormSlot):
    """A norm without parameters, run as it is, followed by a recorded gain."""

    # Whether `normalise` rounds to the type that the gain multiplies.
    rounds_itself = False

    @abstractmethod
    def normalise(self, x: Tensor) -> Tensor:
        """The layer's output before its gain."""

    def spread(self, vector: Tensor, like: Tensor) -> Tensor:
        """A gain shaped to multiply `like`: along the last axes, unless a subclass differs."""
        return vector

    def per_sample(self, product: Tensor) -> Tensor:
        """(B, width) sums over positions."""
        shape = cast(Tensor, self.parameters["weight"]).shape
        return product.reshape(product.shape[0], -1, *shape).sum(1)

    def with_gain(self, x: Tensor) -> Tensor:
        """The layer's output. `forward` itself has the module's own name for its argument."""
        if not torch.is_grad_enabled():
            return cast(Tensor, self.plain(x))
        batch = batch_of(self)
        if x.shape[0] != size_of(batch):
            x = self.over_batch(x, size_of(batch))
        weight, bias = self.parameters["weight"], self.parameters.get("bias")
        # A CPU rounds once, after the gain, to the type of the input. Rounded otherwise, maxima
        # further on may be others.
        on_host = batch.device == "cpu" and not self.rounds_itself
        normed = self.normalise(plain.widen(x) if on_host else x)
        anchor = recorder_of(self).anchor
        out = cast(Tensor, GainFunction.apply(normed, weight, bias, self, batch, anchor))
        return out if self.rounds_itself else out.to(x.dtype if on_host else normed.dtype)


class RMSNormSlot(GainSlot):
    """`nn.RMSNorm`."""

    kind = "rms-norm"
    may_fold = True

    def forward(self, x: Tensor) -> Tensor:
        return self.with_gain(x)

    def normalise(self, x: Tensor) -> Tensor:
        layer = cast(nn.RMSNorm, self.module)
        return F.rms_norm(x, list(layer.normalized_shape), None, layer.eps)


class GroupNormSlot(GainSlot):
    """`nn.GroupNorm`: the gain runs along axis 1."""

    kind = "group-norm"

    def forward(self, input: Tensor) -> Tensor:
        return self.with_gain(input)

    def normalise(self, x: Tensor) -> Tensor:
        layer = cast(nn.GroupNorm, self.module)
        return F.group_norm(x, layer.num_groups, None, None, layer.eps)

    def spread(self, vector: Tensor, like: Tensor) -> Tensor:
        return vector.view(-1, *(1,) * (like.dim() - 2))

    def per_sample(self, product: Tensor) -> Tensor:
        return product.reshape(*product.shape[:2], -1).sum(2)


class LlamaRMSNormSlot(GainSlot):
    """The RMS norm of Llama and its relatives, which normalises in float32 whatever comes in."""

    kind = "rms-norm"
    may_fold = True
    rounds_itself = True

    def __init__(self, **site: Any) -> None:
        super().__init__(**site)
        self.eps = float(cast(Any, self.module).variance_epsilon)

    def normalise(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        variance = wide.pow(2).mean(-1, keepdim=True)
        return (wide * torch.rsqrt(variance + self.eps)).to(x.dtype)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.with_gain(hidden_states)
