"""Norms of embedding tables, where the plain definitions would keep a GPU busy in float64.

Shapes: B samples, T and S tokens, D features, V rows of the table. Matrix products in float64 run
at a fifteenth of the speed of bfloat16's and grow with the square of the tokens. Two things avoid
them: tokens that share a row are added up in float64, each once; and where both operands of a
product are half precision, matrix units multiply them exactly, and a bound on what they cut off
while adding is counted in. Where there is Triton, `triton_tables` does the same in fewer passes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shuffled_dpsgd.clipping.kernels import plain

# From here on adding rows up takes less time than the Gram matrix.
MIN_TOKENS = 256


def serves_rows(g_BTD: Tensor) -> bool:
    """Whether the rows of a table with these gradients are better added up."""
    return g_BTD.is_cuda and g_BTD.dtype is torch.float32 and g_BTD.shape[1] >= MIN_TOKENS


def serves_ties(x_BTD: Tensor, gl_BTV: Tensor, ge_BSD: Tensor) -> bool:
    """Whether matrix units can multiply a tied head's input and output gradient."""
    halves = plain.on_tensor_cores(x_BTD) and x_BTD.dtype == gl_BTV.dtype
    return halves and ge_BSD.dtype is not torch.float64


def distinct_rows(ids_BT: Tensor) -> Tensor:
    """(B, T) numbers below T, the same for two tokens of a sample exactly if their ids are."""
    ordered_BT, order_BT = ids_BT.sort(1)
    number_BT = torch.zeros_like(ordered_BT)
    number_BT[:, 1:] = (ordered_BT[:, 1:] != ordered_BT[:, :-1]).cumsum(1)
    return torch.empty_like(number_BT).scatter_(1, order_BT, number_BT)


def embedding_sq_norms(ids_BT: Tensor, g_BTD: Tensor, padding_idx: int | None) -> Tensor:
    """`plain.embedding_sq_norms` of float32 gradients from the rows of the table themselves.

    A sample touches at most T rows, so they are added up in a table of T rows, in float64.
    """
    (B, T), D = ids_BT.shape, g_BTD.shape[2]
    if padding_idx is not None:
        g_BTD = torch.where((ids_BT == padding_idx)[:, :, None], 0.0, g_BTD)
    rows_BT = distinct_rows(ids_BT)
    parts = []
    for some in plain.slices(B, T * D):
        grads = g_BTD[some].double()
        first = torch.arange(0, len(grads) * T, T, device=ids_BT.device)[:, None]
        table = torch.zeros((len(grads) * T, D), dtype=torch.float64, device=ids_BT.device)
        table.index_add_(0, (rows_BT[some] + first).flatten(), grads.flatten(0, 1))
        parts.append(table.square_().view(len(grads), -1).sum(1))
    total_B = parts[0] if len(parts) == 1 else torch.cat(parts)
    reach_B = torch.linalg.vector_norm(g_BTD, dim=2, dtype=torch.float64).sum(1)
    return plain.not_too_small(total_B, reach_B, torch.float32)


def tied_cross_terms(
    x_BTD: Tensor, gl_BTV: Tensor, ids_BS: Tensor, ge_BSD: Tensor, padding_idx: int | None
) -> Tensor:
    """`plain.tied_cross_terms` plus a bound on its error, for logits' gradients in x's precision.

    sum_s <ge_s, sum_t gl_t[id_s] x_t>: the inner sum is a product of two half-precision matrices.
    Cutting off loses at most T/16 units in the last place of sum_t |gl_t[id_s]| |x_t|, see
    `plain.above_cut_off`; multiplying by ge_s and changing precision, fewer than two more.
    """
    (B, T, _), S = x_BTD.shape, ids_BS.shape[1]
    if padding_idx is not None:
        ge_BSD = torch.where((ids_BS != padding_idx)[:, :, None], ge_BSD, 0.0)
    ge_BSD = ge_BSD.float()
    x_BT = torch.linalg.vector_norm(x_BTD, dim=2, dtype=torch.float32)
    ge_BS = torch.linalg.vector_norm(ge_BSD, dim=2)
    total_B = torch.zeros(B, dtype=torch.float64, device=x_BTD.device)
    reach_B = torch.zeros(B, dtype=torch.float32, device=x_BTD.device)
    for rows in plain.slices(T, B * S):
        x_rows = plain.tokens(x_BTD, rows)
        picked = plain.tokens(gl_BTV, rows)
        picked = picked.gather(2, ids_BS[:, None, :].expand(-1, x_rows.shape[1], -1))
        products = plain.outer_products(picked, x_rows).mul_(ge_BSD)
        total_B += products.sum((1, 2), dtype=torch.float64)
        lengths_BS = (picked.abs() * x_BT[:, rows, None]).sum(1)
        reach_B += (lengths_BS * ge_BS).sum(1)
    cut_off = 2.0**-23 * (-(-T // 16) + 2)
    return total_B.float() + cut_off * reach_B
