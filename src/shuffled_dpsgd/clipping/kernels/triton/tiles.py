"""Norms of linear layers on a GPU from tiles of the gradient, for samples of many tokens.

Shapes: L layers of one shape, B samples, T tokens, S slices of them, D input features, P output
features. Operands as in `linear`; every product is accumulated in float32. All layers
share two launches: one multiplies tiles out and squares them; the other reads the tokens once for
their lengths, which bound what the matrix units may have cut off, and for the bias's gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from shuffled_dpsgd.clipping.kernels import plain
from shuffled_dpsgd.clipping.kernels.triton.addresses import address_table
from shuffled_dpsgd.clipping.kernels.triton.device_limits import stages_that_fit
from shuffled_dpsgd.clipping.kernels.triton.linear import ELEMENT, tile_at
from shuffled_dpsgd.clipping.kernels.triton.sums import may_read_past, outer_chunk, readable_width

# Rows and columns of a tile, tokens multiplied at a time, and stages of the pipeline where shared
# memory has room for them.
BLOCK_P, BLOCK_D, CHUNK, NUM_STAGES = 128, 256, 64, 3
# Tokens of a slice, features read at a time and warps of the kernel that reads tokens. Slices of
# 64 make the sums of a bias's slices a thirty-second of what is read.
SLICE, FEATURES, READING_WARPS = 64, 128, 4


@triton.jit(do_not_specialize=["B", "T"])
def tile_kernel(  # type: ignore[no-untyped-def]
    x_table, g_table, out_LBN, B, T, D, P, x_batch, x_row, g_batch, g_row,
    EVEN_T: tl.constexpr, EVEN_P: tl.constexpr, EVEN_D: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr, ELEMENT: tl.constexpr,
):  # fmt: skip
    """Squared norm of one tile of one sample's g^T x in one layer."""
    tile, sample, layer = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    tiles_d = tl.cdiv(D, BLOCK_D)
    p = (tile // tiles_d) * BLOCK_P + tl.arange(0, BLOCK_P)
    d = (tile % tiles_d) * BLOCK_D + tl.arange(0, BLOCK_D)
    x = tile_at(x_table, layer, ELEMENT) + sample * x_batch
    g = tile_at(g_table, layer, ELEMENT) + sample * g_batch
    acc = tl.zeros((BLOCK_P, BLOCK_D), dtype=tl.float32)
    for first in range(0, T, CHUNK):
        t = first + tl.arange(0, CHUNK)
        acc = outer_chunk(g, x, g_row, x_row, t, p, d, T, P, D, acc, EVEN_T, EVEN_P, EVEN_D)
    acc = tl.where((p < P)[:, None] & (d < D)[None, :], acc, 0.0)
    at = (layer * B + sample) * tl.num_programs(0) + tile
    tl.store(out_LBN + at, tl.sum(acc * acc))


@triton.jit(do_not_specialize=["B", "T"])
def token_kernel(  # type: ignore[no-untyped-def]
    x_table, g_table, reach_LBS, sums_LBSP, B, T, D, P, readable_d, readable_p,
    x_batch, x_row, g_batch, g_row,
    BIAS: tl.constexpr, SLICE: tl.constexpr, FEATURES: tl.constexpr, ELEMENT: tl.constexpr,
):  # fmt: skip
    """Sums of |x_t| |g_t|, with BIAS of g_t, over a slice; padding is read, not used."""
    part, sample, layer = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    at = (layer * B + sample) * tl.num_programs(0) + part
    t = part * SLICE + tl.arange(0, SLICE)
    k = tl.arange(0, FEATURES)
    x = tile_at(x_table, layer, ELEMENT) + sample * x_batch + t[:, None] * x_row + k[None, :]
    g = tile_at(g_table, layer, ELEMENT) + sample * g_batch + t[:, None] * g_row + k[None, :]
    x_squares = tl.zeros((SLICE, FEATURES), dtype=tl.float32)
    for start in range(0, D, FEATURES):
        inside = (t < T)[:, None] & (start + k < readable_d)[None, :]
        tile = tl.load(x + start, mask=inside, other=0.0).to(tl.float32)
        tile = tl.where((start + k < D)[None, :], tile, 0.0)
        x_squares += tile * tile
    g_squares = tl.zeros((SLICE, FEATURES), dtype=tl.float32)
    for start in range(0, P, FEATURES):
        inside = (t < T)[:, None] & (start + k < readable_p)[None, :]
        tile = tl.load(g + start, mask=inside, other=0.0).to(tl.float32)
        tile = tl.where((start + k < P)[None, :], tile, 0.0)
        g_squares += tile * tile
        if BIAS:
            tl.store(sums_LBSP + at * P + start + k, tl.sum(tile, 0), mask=start + k < P)
    lengths = tl.sqrt(tl.sum(x_squares, 1)) * tl.sqrt(tl.sum(g_squares, 1))
    tl.store(reach_LBS + at, tl.sum(lengths))


def reach_and_bias(xs: Sequence[Tensor], gs: Sequence[Tensor], bias: bool) -> tuple[Tensor, Tensor]:
    """(L, B) tensors: `plain.reach` and |sum_t g_t|^2, which is zero without `bias`."""
    (B, T, D), P, L = xs[0].shape, gs[0].shape[2], len(xs)
    x, g = xs[0], gs[0]
    slices = triton.cdiv(T, SLICE)
    table = address_table((xs, gs), x.device)
    reach = torch.empty(L, B, slices, dtype=torch.float32, device=x.device)
    sums = torch.empty(L, B, slices, P if bias else 0, dtype=torch.float32, device=x.device)
    token_kernel[(slices, B, L)](
        table[0], table[1], reach, sums, B, T, D, P, readable_width(x), readable_width(g),
        x.stride(0), x.stride(1), g.stride(0), g.stride(1), BIAS=bias, SLICE=SLICE,
        FEATURES=FEATURES, ELEMENT=ELEMENT[x.dtype], num_warps=READING_WARPS,
    )  # fmt: skip
    return reach.sum(2), sums.sum(2).square_().sum(2)


def tile_sq_norms(xs: Sequence[Tensor], gs: Sequence[Tensor], bias: bool) -> Tensor:
    """`plain.tile_sq_norms` of L layers of one shape, (L, B)."""
    (B, T, D), P, L = xs[0].shape, gs[0].shape[2], len(xs)
    x, g = xs[0], gs[0]
    # As many bytes for a row of either type.
    block_d = 2 * BLOCK_D // x.element_size()
    tiles = triton.cdiv(P, BLOCK_P) * triton.cdiv(D, block_d)
    stage_bytes = CHUNK * (BLOCK_P + block_d) * x.element_size()
    stages = stages_that_fit(NUM_STAGES, stage_bytes, x.device)
    table = address_table((xs, gs), x.device)
    out = torch.empty(L, B, tiles, dtype=torch.float32, device=x.device)
    tile_kernel[(tiles, B, L)](
        table[0], table[1], out, B, T, D, P, x.stride(0), x.stride(1), g.stride(0), g.stride(1),
        EVEN_T=T % CHUNK == 0, EVEN_P=may_read_past(g, triton.cdiv(P, BLOCK_P) * BLOCK_P),
        EVEN_D=may_read_past(x, triton.cdiv(D, block_d) * block_d), CHUNK=CHUNK, BLOCK_P=BLOCK_P,
        BLOCK_D=block_d, ELEMENT=ELEMENT[x.dtype], num_warps=8, num_stages=stages,
    )  # fmt: skip
    reach_LB, bias_LB = reach_and_bias(xs, gs, bias)
    # The cut-off is one of the gradient here, not of its square.
    squares_LB = plain.above_cut_off(out.sum(2).sqrt_(), reach_LB.sqrt_(), T, dtype=x.dtype)
    squares_LB.square_()
    return squares_LB.add_(bias_LB) if bias else squares_LB
