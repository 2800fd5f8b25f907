"""Norms by Gram matrices on a GPU for samples of a few more than 128 tokens, such as ViT's 197.

Shapes: L layers of one shape, B samples, T tokens, D input features, P output features.

Square blocks of 128 tokens would compute 256 x 256 products per feature for a symmetric matrix of
197 x 197. Here one program multiplies the tokens before 128 with each other. Another does the rest:
the tokens from 128 to 192 with each other and with those before, and up to 16 more as a narrow
operand. That is half the products and two thirds of the reading.
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
from shuffled_dpsgd.clipping.kernels.triton.linear import ELEMENT, gram_block, tile_at

# Where a sample is cut: the tokens of the first program, of the second, and of its narrow operand.
HEAD, TAIL, NARROW = 128, 64, 16
MIN_TOKENS, MAX_TOKENS = HEAD + 1, HEAD + TAIL + NARROW
# Features read at a time, warps, and stages of the pipeline where shared memory has room for them.
STEP, NUM_WARPS, NUM_STAGES = 64, 8, 4


@triton.jit
def some_rows(base, rows, k, start, T, WIDTH, stride, EVEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Features from `start` on of some tokens, zero past the end of either."""
    ptrs = base + rows[:, None] * stride + (start + k)[None, :]
    if EVEN:
        return tl.load(ptrs, mask=(rows < T)[:, None], other=0.0)
    return tl.load(ptrs, mask=(rows < T)[:, None] & ((start + k)[None, :] < WIDTH), other=0.0)


@triton.jit
def rest_of_gram(  # type: ignore[no-untyped-def]
    base, T, WIDTH, stride, HAS_NARROW: tl.constexpr, STEP: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Inner products of the tokens h before 128, t from 128 and n from 192 on, each with each.

    In this order: <t, h>, <t, t>, <h, n>, <t, n>, <n, n>; the last has rows of zeros.
    """
    k = tl.arange(0, STEP)
    head = tl.arange(0, 128)
    tail = 128 + tl.arange(0, 64)
    narrow = 192 + tl.arange(0, 16)
    th = tl.zeros((64, 128), dtype=tl.float32)
    tt = tl.zeros((64, 64), dtype=tl.float32)
    hn = tl.zeros((128, 16), dtype=tl.float32)
    tn = tl.zeros((64, 16), dtype=tl.float32)
    nn = tl.zeros((64, 16), dtype=tl.float32)
    for start in range(0, WIDTH, STEP):
        h = some_rows(base, head, k, start, T, WIDTH, stride, EVEN)
        t = some_rows(base, tail, k, start, T, WIDTH, stride, EVEN)
        th = tl.dot(t, tl.trans(h), th)
        tt = tl.dot(t, tl.trans(t), tt)
        if HAS_NARROW:
            n = some_rows(base, narrow, k, start, T, WIDTH, stride, EVEN)
            # The matrix units want 64 rows on the left; those past the end are not read.
            w = some_rows(base, tail + 64, k, start, T, WIDTH, stride, EVEN)
            hn = tl.dot(h, tl.trans(n), hn)
            tn = tl.dot(t, tl.trans(n), tn)
            nn = tl.dot(w, tl.trans(n), nn)
    return th, tt, hn, tn, nn


@triton.jit
def lengths_of(products):  # type: ignore[no-untyped-def]
    """The sum of |x_t| |g_t| over the diagonal of a block that starts with it."""
    rows = tl.arange(0, products.shape[0])[:, None]
    cols = tl.arange(0, products.shape[1])[None, :]
    return tl.sum(tl.where(rows == cols, tl.sqrt(tl.maximum(products, 0.0)), 0.0))


@triton.jit(do_not_specialize=["B"])
def two_part_gram_kernel(  # type: ignore[no-untyped-def]
    x_table, g_table, out_LB22, B, T, D, P, x_batch, x_row, g_batch, g_row,
    BIAS: tl.constexpr, HAS_NARROW: tl.constexpr, STEP: tl.constexpr,
    EVEN_D: tl.constexpr, EVEN_P: tl.constexpr, ELEMENT: tl.constexpr,
):  # fmt: skip
    """One of two parts of sum_ts <x_t, x_s> <g_t, g_s> for one sample of one layer.

    Beside it that part of the sum of |x_t| |g_t|. Tokens past the end have zeros in g's products.
    """
    part, sample, layer = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    out = out_LB22 + 2 * (2 * (layer * B + sample) + part)
    x = tile_at(x_table, layer, ELEMENT) + sample * x_batch
    g = tile_at(g_table, layer, ELEMENT) + sample * g_batch
    one = 1.0 if BIAS else 0.0
    if part == 0:
        t = tl.arange(0, 128)
        x_gram = gram_block(x, t, t, T, D, x_row, True, 128, STEP, EVEN_D)
        products = (x_gram + one) * gram_block(g, t, t, T, P, g_row, True, 128, STEP, EVEN_P)
        tl.store(out, tl.sum(products))
        tl.store(out + 1, lengths_of(products))
    else:
        x_th, x_tt, x_hn, x_tn, x_nn = rest_of_gram(x, T, D, x_row, HAS_NARROW, STEP, EVEN_D)
        g_th, g_tt, g_hn, g_tn, g_nn = rest_of_gram(g, T, P, g_row, HAS_NARROW, STEP, EVEN_P)
        tt = (x_tt + one) * g_tt
        across = tl.sum((x_th + one) * g_th)
        within = tl.sum(tt)
        lengths = lengths_of(tt)
        if HAS_NARROW:
            nn = (x_nn + one) * g_nn
            across += tl.sum((x_hn + one) * g_hn) + tl.sum((x_tn + one) * g_tn)
            within += tl.sum(nn)
            lengths += lengths_of(nn)
        # Pairs of tokens from different blocks were met once and count twice.
        tl.store(out, 2.0 * across + within)
        tl.store(out + 1, lengths)


def gram_sq_norms(xs: Sequence[Tensor], gs: Sequence[Tensor], bias: bool) -> Tensor:
    """`plain.gram_sq_norms` of L layers of one shape, (L, B); T from MIN_TOKENS to MAX_TOKENS."""
    (B, T, D), P, L = xs[0].shape, gs[0].shape[2], len(xs)
    x, g = xs[0], gs[0]
    # The narrow operand is read twice, once with rows of zeros.
    tokens = HEAD + TAIL + (NARROW + TAIL if T > HEAD + TAIL else 0)
    stages = stages_that_fit(NUM_STAGES, tokens * STEP * 2, x.device)
    table = address_table((xs, gs), x.device)
    out = torch.empty(L, B, 2, 2, dtype=torch.float32, device=x.device)
    two_part_gram_kernel[(2, B, L)](
        table[0], table[1], out, B, T, D, P, x.stride(0), x.stride(1), g.stride(0), g.stride(1),
        BIAS=bias, HAS_NARROW=T > HEAD + TAIL, STEP=STEP, EVEN_D=D % STEP == 0,
        EVEN_P=P % STEP == 0, ELEMENT=ELEMENT[x.dtype], num_warps=NUM_WARPS, num_stages=stages,
    )  # fmt: skip
    squares_LB, reach_LB = out.sum(2).unbind(2)
    return plain.above_cut_off(squares_LB, reach_LB, D, P)
