"""The numeric primitives of per-sample clipping, in plain torch.

Shapes: B samples, T positions, D inputs, P outputs, V vocabulary entries, S any parameter shape.

Results are accumulated and returned in float32, or float64 when the operands are float64. In the
weighted sums a sample whose factor is exactly zero contributes nothing, even where its operands
are infinite or NaN. `out`, where given, is added to in place and returned.
"""

from __future__ import annotations

import torch
from torch import Tensor

_TILE_ELEMENTS = 1 << 24


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The accumulation type of an operand type: float64 stays, anything narrower is float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(wide_dtype(tensor.dtype))


def gram_sq_norms(x_BTD: Tensor, g_BTP: Tensor, bias: bool) -> Tensor:
    """Squared norm of each g_b^T x_b (and of the bias gradient) from two T×T Gram matrices.

    ||sum_t g_t x_t^T||² = sum_ts <x_t, x_s><g_t, g_s>, and ||sum_t g_t||² = sum_ts <g_t, g_s>.
    """
    x_BTD, g_BTP = _wide(x_BTD), _wide(g_BTP)
    if x_BTD.shape[1] == 1:
        x_sq_B = x_BTD.square().sum((1, 2))
        g_sq_B = g_BTP.square().sum((1, 2))
        return g_sq_B * (x_sq_B + 1) if bias else g_sq_B * x_sq_B
    x_gram_BTT = torch.bmm(x_BTD, x_BTD.mT)
    if bias:
        x_gram_BTT += 1
    return x_gram_BTT.mul_(torch.bmm(g_BTP, g_BTP.mT)).sum((1, 2)).clamp_(min=0)


def tile_sq_norms(x_BTD: Tensor, g_BTP: Tensor, bias: bool) -> Tensor:
    """The same squared norms from tiles of the per-sample gradient, none of which is kept."""
    x_BTD, g_BTP = _wide(x_BTD), _wide(g_BTP)
    B, _, D = x_BTD.shape
    P = g_BTP.shape[2]
    width = max(1, min(P, _TILE_ELEMENTS // max(1, B * D)))
    total_B = g_BTP.sum(1).square().sum(1) if bias else x_BTD.new_zeros(B)
    for start in range(0, P, width):
        tile = torch.bmm(g_BTP[:, :, start : start + width].mT, x_BTD)
        total_B = total_B + tile.square_().sum((1, 2))
    return total_B


def outer_products(x_BTD: Tensor, g_BTP: Tensor) -> Tensor:
    """Every sample's g_b^T x_b, stored: (B, P, D)."""
    return torch.bmm(_wide(g_BTP).mT, _wide(x_BTD))


def embedding_sq_norms(ids_BT: Tensor, g_BTD: Tensor, padding_idx: int | None) -> Tensor:
    """Squared norm of each sample's embedding gradient; repeated tokens meet in one row."""
    g_BTD = _wide(g_BTD)
    same_BTT = ids_BT.unsqueeze(2) == ids_BT.unsqueeze(1)
    if padding_idx is not None:
        same_BTT = same_BTT & (ids_BT != padding_idx).unsqueeze(1)
    gram_BTT = torch.bmm(g_BTD, g_BTD.mT)
    return gram_BTT.mul_(same_BTT).sum((1, 2)).clamp_(min=0)


def tied_cross_terms(
    x_BSD: Tensor, gl_BSV: Tensor, ids_BT: Tensor, ge_BTD: Tensor, padding_idx: int | None
) -> Tensor:
    """Inner product, per sample, of the head's and the embedding's gradient of one shared weight.

    <sum_s gl_s x_s^T, sum_t e[id_t] ge_t^T> = sum_st gl_s[id_t] <x_s, ge_t>.
    """
    x_BSD, ge_BTD = _wide(x_BSD), _wide(ge_BTD)
    B, S, _ = x_BSD.shape
    picked_BST = gl_BSV.gather(2, ids_BT.unsqueeze(1).expand(B, S, ids_BT.shape[1]))
    products_BST = torch.bmm(x_BSD, ge_BTD.mT).mul_(picked_BST)
    if padding_idx is not None:
        products_BST.mul_((ids_BT != padding_idx).unsqueeze(1))
    return products_BST.sum((1, 2))


def _contributing(factors_B: Tensor, *operands: Tensor) -> tuple[Tensor, ...]:
    """Drop samples of factor zero: on a CPU by selection, elsewhere (no host sync) by masking."""
    if factors_B.device.type == "cpu":
        kept = factors_B != 0
        if bool(kept.all()):
            return (factors_B, *operands)
        return (factors_B[kept], *(operand[kept] for operand in operands))
    masked = []
    for operand in operands:
        shape = (-1,) + (1,) * (operand.dim() - 1)
        masked.append(torch.where((factors_B != 0).view(shape), operand, 0))
    return (factors_B, *masked)


def weighted_outer_sum(
    x_BTD: Tensor, g_BTP: Tensor, factors_B: Tensor, out: Tensor | None = None
) -> Tensor:
    """sum_b f_b g_b^T x_b: (P, D), scaled in the wide type so that no sample exceeds its bound."""
    factors_B, x_BTD, g_BTP = _contributing(factors_B, _wide(x_BTD), _wide(g_BTP))
    scaled_NP = (g_BTP * factors_B.view(-1, 1, 1)).flatten(0, 1)
    x_ND = x_BTD.flatten(0, 1)
    if out is None:
        return torch.mm(scaled_NP.mT, x_ND)
    return out.addmm_(scaled_NP.mT, x_ND)


def weighted_row_sum(g_BTP: Tensor, factors_B: Tensor, out: Tensor | None = None) -> Tensor:
    """sum_b f_b sum_t g_bt: (P,)."""
    factors_B, g_BTP = _contributing(factors_B, _wide(g_BTP))
    total_P = torch.mv(g_BTP.sum(1).mT, factors_B)
    return total_P if out is None else out.add_(total_P)


def weighted_dense_sum(grads_BS: Tensor, factors_B: Tensor, out: Tensor | None = None) -> Tensor:
    """sum_b f_b G_b for stored per-sample gradients."""
    shape = grads_BS.shape[1:]
    factors_B, grads_BS = _contributing(factors_B, _wide(grads_BS))
    total = torch.mv(grads_BS.flatten(1).mT, factors_B).view(shape)
    return total if out is None else out.add_(total)


def weighted_embedding_sum(
    ids_BT: Tensor, g_BTD: Tensor, factors_B: Tensor, padding_idx: int | None, out: Tensor
) -> Tensor:
    """Add f_b g_bt to row id_bt of `out`; the padding row receives nothing."""
    factors_B, ids_BT, g_BTD = _contributing(factors_B, ids_BT, _wide(g_BTD))
    if padding_idx is not None:
        g_BTD = g_BTD.masked_fill((ids_BT == padding_idx).unsqueeze(2), 0)
    scaled_ND = (g_BTD * factors_B.view(-1, 1, 1)).flatten(0, 1)
    return out.index_add_(0, ids_BT.flatten(), scaled_ND)


def layer_norm_backward(
    x: Tensor, g: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(grad_x, per-sample weight gradients (B, D), per-sample bias gradients (B, D)).

    `x` and `g` are (B, ..., D); mean and rstd are (B, ..., 1) as torch's layer norm returns them.
    """
    B, D = x.shape[0], x.shape[-1]
    g_wide = _wide(g)
    normed = (_wide(x) - mean) * rstd
    scaled = g_wide if weight is None else g_wide * _wide(weight)
    inner = scaled.mean(-1, keepdim=True)
    outer = (scaled * normed).mean(-1, keepdim=True)
    grad_x = rstd * (scaled - inner - normed * outer)
    weight_BD = (g_wide * normed).reshape(B, -1, D).sum(1)
    bias_BD = g_wide.reshape(B, -1, D).sum(1)
    return grad_x.to(x.dtype), weight_BD, bias_BD


def rms_norm_backward(
    x: Tensor, g: Tensor, weight: Tensor | None, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    """(grad_x, per-sample weight gradients (B, D)) of y = weight · x · rstd."""
    B, D = x.shape[0], x.shape[-1]
    g_wide = _wide(g)
    normed = _wide(x) * rstd
    scaled = g_wide if weight is None else g_wide * _wide(weight)
    grad_x = rstd * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))
    weight_BD = (g_wide * normed).reshape(B, -1, D).sum(1)
    return grad_x.to(x.dtype), weight_BD
