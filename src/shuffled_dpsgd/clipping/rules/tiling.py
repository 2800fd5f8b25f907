"""Convolutions whose kernels tile the input, such as ViT's patches: linear maps of the tiles.

No number of the input meets two outputs, so cutting the input into tiles copies each number once,
and the convolution is one matrix product. On a GPU that takes a tenth of the time of cuDNN's
convolution, and the tiles are just what norms and sums are computed from.

Shapes: B samples, K images of a sample where it has several (folded inputs), L output positions, R
output channels, C numbers of a tile.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor, nn

from shuffled_dpsgd.clipping.capture.captures import Capture
from shuffled_dpsgd.clipping.capture.slot import batch_of
from shuffled_dpsgd.clipping.rules.linear import LinearSlot, run_linear


class TilingConvSlot(LinearSlot):
    """`nn.Conv1d` and `nn.Conv2d` with a stride as wide as the kernel, and nothing around it."""

    kind = "convolution"

    def __init__(self, **site: Any) -> None:
        super().__init__(**site)
        self.kernel = tuple(cast(nn.Conv2d, self.module).kernel_size)

    @classmethod
    def accepts(cls, module: nn.Module) -> bool:
        layer = cast(nn.Conv2d, module)
        padded = layer.padding != "valid" and (
            layer.padding == "same" or any(cast(tuple[int, ...], layer.padding))
        )
        apart = layer.kernel_size == layer.stride and set(layer.dilation) == {1}
        return super().accepts(module) and apart and layer.groups == 1 and not padded

    def forward(self, input: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return cast(Tensor, self.plain(input))
        axes = len(self.kernel)
        if input.dim() - axes not in ((2, 3) if self.folded else (2,)):
            raise self.refuse_batch_axis(batch_of(self).size, input.shape)
        places = [
            length // size for length, size in zip(input.shape[-axes:], self.kernel, strict=True)
        ]
        if not math.prod(places):
            # Torch's own error, for an input that is smaller than a tile.
            return cast(Tensor, self.plain(input))
        out_BLR = run_linear(self, self.tiles(input))
        out = out_BLR.mT
        return out.reshape(*out.shape[:-1], *places).contiguous()

    def tiles(self, x: Tensor) -> Tensor:
        """(B, L, C), or (B, K, L, C): each output position's numbers; cast first under autocast."""
        device = x.device.type
        if torch.is_autocast_enabled(device) and x.dtype is not torch.float64:
            x = x.to(torch.get_autocast_dtype(device))
        axes = len(self.kernel)
        lead = x.dim() - axes - 1
        for axis, size in enumerate(self.kernel):
            at = lead + 1 + 2 * axis
            whole = x.shape[at] // size
            x = x.narrow(at, 0, whole * size)
            x = x.reshape(*x.shape[:at], whole, size, *x.shape[at + 1 :])
        places = range(lead + 1, lead + 1 + 2 * axes, 2)
        inside = range(lead + 2, lead + 2 + 2 * axes, 2)
        x = x.permute(*range(lead), *places, lead, *inside)
        return x.flatten(lead, lead + axes - 1).flatten(lead + 1)

    def _decided(self, x: Tensor | None, g: Tensor) -> Capture:
        # With its rows side by side, also where the model goes on with images.
        return super()._decided(x, g.contiguous())
