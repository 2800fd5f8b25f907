"""Convolutions, as linear maps of unfolded patches.

Shapes: B samples, K images of a sample where it has several (folded inputs), L output positions, R
output channels, C weights per output channel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shuffled_dpsgd.clipping.capture.captures import Capture, InputAndGradient, StoredGradients
from shuffled_dpsgd.clipping.capture.slot import Slot, batch_of, recorder_of, size_of, unfolded
from shuffled_dpsgd.clipping.contributions import cost
from shuffled_dpsgd.clipping.contributions.kinds import (
    Contribution,
    OuterGrad,
    RowSumGrad,
)
from shuffled_dpsgd.clipping.kernels.plain import widen
from shuffled_dpsgd.clipping.rules.linear import bias_grads

if TYPE_CHECKING:
    from shuffled_dpsgd.clipping.capture.batch import CapturedBatch


class ConvFunction(torch.autograd.Function):
    """A convolution whose backward computes the input's gradient and records (input, gradient)."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        cast_weights: bool,
        slot: ConvSlot,
        batch: CapturedBatch,
        anchor: Tensor,
    ) -> Tensor:
        if cast_weights:
            weight = weight.to(x.dtype)
            bias = None if bias is None else bias.to(x.dtype)
        ctx.slot, ctx.batch = slot, batch
        ctx.save_for_backward(x, weight)
        zeros = [0] * len(slot.stride)
        out = torch.convolution(
            slot.images(x),
            weight,
            bias,
            slot.stride,
            slot.padding,
            slot.dilation,
            False,
            zeros,
            slot.groups,
        )
        return out if out.dim() == x.dim() else unfolded(out, len(x))

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        slot = ctx.slot
        anchor = recorder_of(slot).record(ctx.batch, slot, (x, g))
        grad_x = None
        if ctx.needs_input_grad[0]:
            zeros = [0] * len(slot.stride)
            grad_x = torch.ops.aten.convolution_backward(
                slot.images(g),
                slot.images(x),
                weight,
                None,
                slot.stride,
                slot.padding,
                slot.dilation,
                False,
                zeros,
                slot.groups,
                [True, False, False],
            )[0]
            grad_x = grad_x.view(x.shape)
        return grad_x, None, None, None, None, None, anchor


class ConvSlot(Slot):
    """`nn.Conv1d` and `nn.Conv2d`, any stride, padding, dilation and number of groups."""

    kind = "convolution"
    fixed_backend = None
    may_fold = True

    def __init__(self, **site: Any) -> None:
        super().__init__(**site)
        layer = cast(nn.Conv2d, self.module)
        self.stride, self.dilation = tuple(layer.stride), tuple(layer.dilation)
        self.kernel, self.groups = tuple(layer.kernel_size), layer.groups
        # Other modes, and padding of equal length, are padded first, by torch's own operation.
        self.pads_first = layer.padding_mode != "zeros" or layer.padding == "same"
        self.pad_mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
        self.pad_widths = list(layer._reversed_padding_repeated_twice)
        none: tuple[int, ...] = (0,) * len(self.stride)
        padding = layer.padding
        self.padding = none if self.pads_first or isinstance(padding, str) else tuple(padding)

    def forward(self, input: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return cast(Tensor, self.plain(input))
        batch, x = batch_of(self), input
        if x.dim() - len(self.stride) not in ((2, 3) if self.folded else (2,)):
            raise self.refuse_batch_axis(batch.size, x.shape)
        if x.shape[0] != size_of(batch):
            x = self.over_batch(x, size_of(batch))
        casts = torch.is_autocast_enabled(batch.device) and x.dtype is not torch.float64
        if casts:
            x = x.to(torch.get_autocast_dtype(batch.device))
        if self.pads_first:
            padded = F.pad(self.images(x), self.pad_widths, mode=self.pad_mode)
            x = padded if x.dim() == padded.dim() else unfolded(padded, len(x))
        owned = self.parameters
        weight, bias, anchor = owned["weight"], owned["bias"], recorder_of(self).anchor
        return cast(Tensor, ConvFunction.apply(x, weight, bias, casts, self, batch, anchor))

    def contributions(self, capture: Capture) -> list[tuple[str, Contribution]]:
        if isinstance(capture, StoredGradients):
            return capture.contributions(self.weight_name, self.bias_name)
        assert isinstance(capture, InputAndGradient)
        found: list[tuple[str, Contribution]] = []
        g_BLR = self._rows(capture.g)
        if self.weight_name is not None:
            x = cast(Tensor, capture.x)
            patches_BLC = self._by_sample(self._patches(self.images(x)).mT, x)
            outer = OuterGrad(left_BTR=g_BLR, right_BTC=patches_BLC, backend=capture.backend)
            found.append((self.weight_name, outer))
        if self.bias_name is not None:
            found.append((self.bias_name, RowSumGrad(grad_BTP=g_BLR)))
        return found

    def _rows(self, g: Tensor) -> Tensor:
        return self._by_sample(self.images(g).flatten(2).mT, g).contiguous()

    def captured(self, part: int, tensors: Sequence[Tensor]) -> Capture:
        capture = InputAndGradient(tensors[0], g := tensors[1])
        if self.weight_name is None:
            return capture
        weight = cast(Tensor, self.parameters["weight"])
        positions = g[0].numel() // weight.shape[0]
        self.last_shape = (positions, weight.shape[0], weight[0].numel())
        self.last_device = g.device.type
        capture.backend = self.choose(*self.last_shape, self.last_device)
        if self.groups == 1 and capture.backend is not cost.NormMethod.INSTANTIATE:
            return capture
        bias_BS = None if self.bias_name is None else bias_grads(self._rows(g))
        return StoredGradients(self._stored(capture), bias_BS)

    def _patches(self, x: Tensor) -> Tensor:
        """(B, channels·kernel, L): the inputs that meet each output position."""
        if len(self.kernel) == 2:
            return F.unfold(x, self.kernel, self.dilation, self.padding, self.stride)
        lifted = x.unsqueeze(2)
        kernel, dilation = (1, *self.kernel), (1, *self.dilation)
        return F.unfold(lifted, kernel, dilation, (0, *self.padding), (1, *self.stride))

    def _stored(self, capture: InputAndGradient) -> Tensor:
        """Every sample's weight gradient, (B, *weight.shape)."""
        weight, x, g = cast(Tensor, self.parameters["weight"]), capture.x, capture.g
        assert x is not None
        patches = widen(self._patches(self.images(x))).unflatten(1, (self.groups, -1))
        g_BGRL = widen(self.images(g).flatten(2)).unflatten(1, (self.groups, -1))
        found = (g_BGRL @ patches.mT).reshape(-1, *weight.shape)
        return found if len(found) == len(g) else unfolded(found, len(g)).sum(1)

    def images(self, x: Tensor) -> Tensor:
        """All images on the first axis: (B, ...), or (B K, ...) of a folded (B, K, ...)."""
        return x.flatten(0, 1) if x.dim() == len(self.stride) + 3 else x

    def _by_sample(self, rows: Tensor, given: Tensor) -> Tensor:
        """(B K, L, ...) as (B, K L, ...): a sample has the positions of all its images."""
        size = len(given)
        return rows if len(rows) == size else unfolded(rows, size).flatten(1, 2)
