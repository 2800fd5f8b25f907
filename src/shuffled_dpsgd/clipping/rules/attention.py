"""`nn.MultiheadAttention`, which uses its projections without calling them.

Shapes: B samples, T and S positions, E the width, H heads.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shuffled_dpsgd.clipping.capture.captures import Capture, InputAndGradient, StoredGradients
from shuffled_dpsgd.clipping.capture.slot import Slot, batch_of, recorder_of, size_of
from shuffled_dpsgd.clipping.contributions import cost
from shuffled_dpsgd.clipping.contributions.kinds import (
    Contribution,
    OuterGrad,
    RowSumGrad,
    stored_outer,
)
from shuffled_dpsgd.clipping.rules.linear import LinearFunction, bias_grads
from shuffled_dpsgd.errors import UnsupportedModuleError

if TYPE_CHECKING:
    from shuffled_dpsgd.clipping.capture.batch import CapturedBatch

# Projections a capture can be of: all three of the packed weight, one of them, or the output's.
PACKED, QUERY, KEY, VALUE, OUT = range(5)
PACKED_NAMES = ("in_proj_weight", "in_proj_bias")


class ProjectionsSlot(Slot):
    """A layer of several linear maps, numbered as `part`, each with its weight and its bias."""

    fixed_backend = None
    # What `LinearFunction` asks of a slot; see `LinearSlot`.
    rows_of_zeros = 0
    keeps_input = True
    lowers_again = False

    @abstractmethod
    def names_of(self, part: int) -> tuple[str, str]:
        """The module's own names of a map's weight and bias."""

    def _padded(self, part: int, g_BTP: Tensor) -> Tensor:
        """The gradient of all outputs of the weight, where a map is but a part of it."""
        return g_BTP

    def captured(self, part: int, tensors: Sequence[Tensor]) -> Capture:
        x_BTE, g = tensors
        g_BTP = self._padded(part, g)
        shape = (x_BTE.shape[1], g_BTP.shape[2], x_BTE.shape[2])
        device = g_BTP.device.type
        if part != OUT:
            self.last_shape, self.last_device = shape, device
        backend = self.choose(*shape, device)
        if backend is not cost.NormMethod.INSTANTIATE:
            return InputAndGradient(x_BTE, g, backend, part)
        grads_BPE, squares_B = stored_outer(g_BTP, x_BTE)
        return StoredGradients(grads_BPE, bias_grads(g_BTP), squares_B, part)

    def contributions(self, capture: Capture) -> list[tuple[str, Contribution]]:
        assert isinstance(capture, InputAndGradient | StoredGradients)
        weight, bias = (self.names.get(name) for name in self.names_of(capture.part))
        if isinstance(capture, StoredGradients):
            return capture.contributions(weight, bias)
        found: list[tuple[str, Contribution]] = []
        g_BTP, x_BTE = self._padded(capture.part, capture.g), cast(Tensor, capture.x)
        if weight is not None:
            outer = OuterGrad(left_BTR=g_BTP, right_BTC=x_BTE, backend=capture.backend)
            found.append((weight, outer))
        if bias is not None:
            found.append((bias, RowSumGrad(grad_BTP=g_BTP)))
        return found


class MultiheadAttentionSlot(ProjectionsSlot):
    """Self- and cross-attention with a packed input projection."""

    kind = "attention"

    def __init__(self, **site: Any) -> None:
        super().__init__(**site)
        self.layer = cast(nn.MultiheadAttention, self.module)
        self.width = self.layer.embed_dim
        self.heads = self.layer.num_heads
        self.batch_axis = 0 if self.layer.batch_first else 1

    @classmethod
    def accepts(cls, module: nn.Module) -> bool:
        """Whether inputs share a width, nothing is appended to keys and values, none is wrapped."""
        layer = cast(nn.MultiheadAttention, module)
        appended = layer.bias_k is not None or layer.add_zero_attn
        known = {*PACKED_NAMES, "out_proj.weight", "out_proj.bias"}
        wrapped = {name for name, _ in layer.named_parameters()} - known
        return layer.in_proj_weight is not None and not appended and not wrapped

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        if not torch.is_grad_enabled():
            return cast(
                tuple[Tensor, Tensor | None],
                self.plain(
                    query,
                    key,
                    value,
                    key_padding_mask=key_padding_mask,
                    need_weights=need_weights,
                    attn_mask=attn_mask,
                    average_attn_weights=average_attn_weights,
                    is_causal=is_causal,
                ),
            )
        if query.dim() != 3 or (is_causal and attn_mask is None):
            raise UnsupportedModuleError(
                self.path,
                expected="batched inputs, and an attn_mask wherever is_causal is set",
                got=f"query of shape {tuple(query.shape)}, attn_mask {attn_mask}",
                remedy="add the batch axis, pass the mask",
            )
        batch = batch_of(self)
        q, k, v = self._projected(query, key, value, batch)
        bias = _additive(attn_mask, key_padding_mask, q, self.heads)
        dropout = self.layer.dropout if self.layer.training else 0.0
        weights = None
        if need_weights:
            scores = q @ k.mT / math.sqrt(q.shape[-1])
            weights = torch.softmax(scores if bias is None else scores + bias, -1)
            weights = F.dropout(weights, dropout) if dropout else weights
            mixed = weights @ v
            weights = weights.mean(1) if average_attn_weights else weights
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, bias, dropout)
        out = self._project(mixed.transpose(1, 2).flatten(2), OUT, batch)
        # Laid out in memory as PyTorch's own: dropout that follows draws its mask in that order,
        # and a model run without the engine must draw the same.
        out_TBE = out.transpose(0, 1).contiguous()
        return out_TBE.transpose(0, 1) if self.layer.batch_first else out_TBE, weights

    def _projected(
        self, query: Tensor, key: Tensor, value: Tensor, batch: CapturedBatch
    ) -> list[Tensor]:
        """Queries, keys and values, each (B, H, T, E/H)."""
        together = query is key and key is value
        if self.recorder.batch is not None:
            batch.calls[self.index] += 1 if together else 3
        inputs = [query] if together else [query, key, value]
        if not self.layer.batch_first:
            inputs = [x.transpose(0, 1) for x in inputs]
        inputs = [self.over_batch(x, size_of(batch)) for x in inputs]
        if together:
            projected = list(self._project(inputs[0], PACKED, batch).chunk(3, -1))
        else:
            parts = (QUERY, KEY, VALUE)
            projected = [self._project(x, p, batch) for x, p in zip(inputs, parts, strict=True)]
        return [x.unflatten(2, (self.heads, -1)).transpose(1, 2) for x in projected]

    def _project(self, x: Tensor, part: int, batch: CapturedBatch) -> Tensor:
        lower = torch.is_autocast_enabled(batch.device) and x.dtype is not torch.float64
        if lower:
            x = x.to(torch.get_autocast_dtype(batch.device))
        weight: Tensor = self.layer.out_proj.weight if part == OUT else self.layer.in_proj_weight
        bias: Tensor | None = self.layer.out_proj.bias if part == OUT else self.layer.in_proj_bias
        if part in (QUERY, KEY, VALUE):
            rows = slice(self.width * (part - QUERY), self.width * (part - QUERY + 1))
            weight = weight.detach()[rows]
            bias = None if bias is None else bias.detach()[rows]
        anchor = recorder_of(self).anchor
        out = LinearFunction.apply(x, weight, bias, part, lower, self, batch, anchor)
        return cast(Tensor, out)

    def names_of(self, part: int) -> tuple[str, str]:
        return ("out_proj.weight", "out_proj.bias") if part == OUT else PACKED_NAMES

    def _padded(self, part: int, g_BTP: Tensor) -> Tensor:
        """The gradient of all three projections, with zeros for the two that were not used."""
        if part not in (QUERY, KEY, VALUE):
            return g_BTP
        before = self.width * (part - QUERY)
        return F.pad(g_BTP, (before, 2 * self.width - before))


def _additive(
    mask: Tensor | None, padding_BS: Tensor | None, q_BHTD: Tensor, heads: int
) -> Tensor | None:
    """Both masks as one tensor to add to the scores, broadcast over (B, H, T, S)."""
    parts = []
    if mask is not None:
        mask = _as_float(mask, q_BHTD.dtype)
        parts.append(mask if mask.dim() == 2 else mask.unflatten(0, (-1, heads)))
    if padding_BS is not None:
        parts.append(_as_float(padding_BS, q_BHTD.dtype)[:, None, None, :])
    if not parts:
        return None
    return parts[0] if len(parts) == 1 else parts[0] + parts[1]


def _as_float(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -torch.inf)
