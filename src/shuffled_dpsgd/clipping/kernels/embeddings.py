"""Embedding tables, also those tied to a head, by the fastest kernels that serve the tensors.

Shapes as in `plain`. Products in float64 run at a fifteenth of the speed of bfloat16's on a GPU and
grow with the square of the tokens. `triton.tables` avoids them in two ways. Tokens that share a row
are added up in float64, each once. Where both operands of a product are half precision, matrix
units multiply them, and a bound on what they cut off while adding is counted in.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shuffled_dpsgd.clipping.kernels import choices, host, plain
from shuffled_dpsgd.runtime.backends import Backend, took

# From here on adding rows up takes less time than the Gram matrix.
MIN_TOKENS = 256


def embedding_sq_norms(ids_BT: Tensor, g_BTD: Tensor, padding_idx: int | None) -> Tensor:
    """`plain.embedding_sq_norms` by the fastest means at hand."""
    long = g_BTD.dtype is torch.float32 and g_BTD.shape[1] >= MIN_TOKENS
    if long and _may_take(choices.TABLES, g_BTD):
        took("norms of embedding tables", "triton.tables")
        tables = choices.module("triton.tables")
        found: Tensor = tables.embedding_sq_norms(ids_BT, g_BTD, padding_idx)
        return found
    took("norms of embedding tables", host.name_for(g_BTD))
    module = host if host.serves(g_BTD) else plain
    return module.embedding_sq_norms(ids_BT, g_BTD, padding_idx)


def tied_cross_terms(
    x_BTD: Tensor, gl_BTV: Tensor, ids_BS: Tensor, ge_BSD: Tensor, padding_idx: int | None
) -> Tensor:
    """`plain.tied_cross_terms` by the fastest means at hand; on matrix units it errs upwards."""
    halves = x_BTD.dtype in choices.HALF and x_BTD.dtype == gl_BTV.dtype
    fits = halves and ge_BSD.dtype is not torch.float64
    fits = fits and _may_take(choices.TIED_TABLES, x_BTD)
    took("cross terms of a tied head", "triton.tables" if fits else "plain")
    module = choices.module("triton.tables") if fits else plain
    found: Tensor = module.tied_cross_terms(x_BTD, gl_BTV, ids_BS, ge_BSD, padding_idx)
    return found


def stored_cross_terms(
    head_BVD: Tensor, ids_BS: Tensor, ge_BSD: Tensor, padding_idx: int | None
) -> Tensor:
    """`plain.stored_cross_terms` by the fastest means at hand."""
    floats = torch.float64 not in (head_BVD.dtype, ge_BSD.dtype)
    fits = floats and head_BVD.is_contiguous() and _may_take(choices.TIED_TABLES, ge_BSD)
    took("cross terms of a stored head", "triton.tables" if fits else "plain")
    module = choices.module("triton.tables") if fits else plain
    found: Tensor = module.stored_cross_terms(head_BVD, ids_BS, ge_BSD, padding_idx)
    return found


def weighted_embedding_sum(
    ids_BT: Tensor, g_BTD: Tensor, factors_B: Tensor, padding_idx: int | None, out_VD: Tensor
) -> Tensor:
    """`plain.weighted_embedding_sum` by the fastest means at hand."""
    fits = (
        g_BTD.dtype is not torch.float64
        and out_VD.dtype is torch.float32
        and out_VD.is_contiguous()
        # The kernel adds tokens that pick one row in any order.
        and not torch.are_deterministic_algorithms_enabled()
        and _may_take(choices.TABLES, g_BTD)
    )
    took("sums of embedding tables", "triton.tables" if fits else "plain")
    if not fits:
        return plain.weighted_embedding_sum(ids_BT, g_BTD, factors_B, padding_idx, out_VD)
    tables = choices.module("triton.tables")
    tables.weighted_embedding_sum(ids_BT, g_BTD, factors_B.float(), padding_idx, out_VD)
    return out_VD


def _may_take(backend: Backend, of_BTD: Tensor) -> bool:
    """Whether the kernels serve there and have something to do."""
    return of_BTD.numel() > 0 and choices.may_take(backend, of_BTD.device)
