"""Norms of float32 linear layers by Gram matrices on tensor cores, from halves of every number.

Shapes: L layers of one shape, B samples, T tokens in blocks of K, D and W input features without
and with zeros, P and V output features likewise, N pairs of blocks, S shares of the output
features.

With x = h + l, the inner product of two tokens is <h, h> + <h, l> + <l, h>; <l, l> is below the
rounding of float32. Tensor cores cut a running sum off instead of rounding it, so they add up no
more than 64 features at a time, the small terms first, and the rest is added in float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from shuffled_dpsgd.clipping.kernels.triton.device_limits import stages_that_fit
from shuffled_dpsgd.clipping.kernels.triton.halves import STEP, Halves
from shuffled_dpsgd.clipping.kernels.triton.wide import pair_of, tokens_of

MAX_BLOCK, NUM_WARPS, NUM_STAGES = 64, 4, 3
# Output features of a share: a vocabulary's are shared out, for want of samples.
SHARE = 8192


@triton.jit
def half_rows(base, rows, k, T, stride, EVEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Some features of some tokens, zero past the last token."""
    ptrs = base + rows[:, None] * stride + k[None, :]
    if EVEN:
        return tl.load(ptrs)
    return tl.load(ptrs, mask=(rows < T)[:, None], other=0.0)


@triton.jit
def split_gram_block(  # type: ignore[no-untyped-def]
    high, low, rows, cols, T, first, end, stride, SAME: tl.constexpr, BLOCK: tl.constexpr,
    STEP: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """<a_row, a_col> of two blocks of tokens over the features from `first` to `end`.

    For a block with itself <l, h> counts twice in place of <h, l>. The result is then not quite
    symmetric. Multiplied with another of that kind, entry by entry, and added up, that makes a
    difference of 2^-22 or so.
    """
    total = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    for start in range(first, end, STEP):
        k = start + tl.arange(0, STEP)
        a = half_rows(high, rows, k, T, stride, EVEN)
        a_low = half_rows(low, rows, k, T, stride, EVEN)
        if SAME:
            part = tl.dot(a_low, tl.trans(a))
            part = tl.dot(a, tl.trans(a), part + part)
        else:
            b = half_rows(high, cols, k, T, stride, EVEN)
            b_low = half_rows(low, cols, k, T, stride, EVEN)
            part = tl.dot(a_low, tl.trans(b))
            part = tl.dot(a, tl.trans(b_low), part)
            part = tl.dot(a, tl.trans(b), part)
        total += part
    return total


@triton.jit
def both_blocks(  # type: ignore[no-untyped-def]
    x_high, x_low, g_high, g_low, rows, cols, T, W, first, end, V, SAME: tl.constexpr,
    BLOCK: tl.constexpr, STEP: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    x = split_gram_block(x_high, x_low, rows, cols, T, 0, W, W, SAME, BLOCK, STEP, EVEN)
    g = split_gram_block(g_high, g_low, rows, cols, T, first, end, V, SAME, BLOCK, STEP, EVEN)
    return x, g


@triton.jit(do_not_specialize=["B", "T", "S"])
def split_gram_kernel(  # type: ignore[no-untyped-def]
    x, g, ones_LB, out_LBSN, x_squares_LBT, g_squares_LBST, B, T, W, V, S, share,
    X_LOW_FIRST: tl.constexpr, G_LOW_FIRST: tl.constexpr, ONE_PAIR: tl.constexpr,
    BLOCK: tl.constexpr, STEP: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Sum of <x_t, x_s> <g_t, g_s> for a pair of blocks of a sample, over a share of g's features.

    Beside it, for a block with itself, every token's <x_t, x_t> and <g_t, g_t>.
    """
    pair, sample = tl.program_id(0), tl.program_id(1).to(tl.int64)
    layer, part = tl.program_id(2) // S, tl.program_id(2) % S
    i, j = pair_of(pair)
    rows, cols = tokens_of(i, BLOCK), tokens_of(j, BLOCK)
    at = layer * B + sample
    x += at * 2 * T * W
    g += at * 2 * T * V
    x_high = x + T.to(tl.int64) * W if X_LOW_FIRST else x
    x_low = x if X_LOW_FIRST else x + T.to(tl.int64) * W
    g_high = g + T.to(tl.int64) * V if G_LOW_FIRST else g
    g_low = g if G_LOW_FIRST else g + T.to(tl.int64) * V
    first = tl.multiple_of(part * share, STEP)
    end = tl.multiple_of(tl.minimum(first + share, V), STEP)
    # A single pair needs no room for two blocks of tokens, and that is known when compiling.
    if ONE_PAIR:  # noqa: SIM114
        x_gram, g_gram = both_blocks(
            x_high, x_low, g_high, g_low, rows, cols, T, W, first, end, V, True, BLOCK, STEP, EVEN
        )
    elif i == j:
        x_gram, g_gram = both_blocks(
            x_high, x_low, g_high, g_low, rows, cols, T, W, first, end, V, True, BLOCK, STEP, EVEN
        )
    else:
        x_gram, g_gram = both_blocks(
            x_high, x_low, g_high, g_low, rows, cols, T, W, first, end, V, False, BLOCK, STEP, EVEN
        )
    x_gram += tl.load(ones_LB + at)
    # Tokens past the end have a zero row in g's Gram matrix; each off-diagonal pair counts twice.
    total = tl.sum(x_gram * g_gram)
    out = out_LBSN + (at * S + part) * tl.num_programs(0) + pair
    tl.store(out, tl.where(i == j, total, 2.0 * total))
    if i == j:
        diagonal = rows[:, None] == cols[None, :]
        x_squares = tl.sum(tl.where(diagonal, x_gram, 0.0), 1)
        g_squares = tl.sum(tl.where(diagonal, g_gram, 0.0), 1)
        tl.store(g_squares_LBST + (at * S + part) * T + rows, g_squares, mask=rows < T)
        if part == 0:
            tl.store(x_squares_LBT + at * T + rows, x_squares, mask=rows < T)


def cut_off(tokens: int, *widths: int) -> tuple[float, float]:
    """What a squared norm, and what a sum, may be off by, relative to the length of all terms.

    In units of 2^-23: tensor cores add 16 products at a time and lose one unit each time. A Gram
    matrix loses 4 in 64 features, half of one for each addition of 64 more, and 12 to the halves;
    adding up its entries takes 8 at most. A sum of products over tokens loses what its tokens
    take, and 8 to the halves.
    """
    norm = sum(16 + -(-width // (2 * STEP)) for width in widths) + 8
    return 2.0**-23 * norm, 2.0**-23 * (8 + -(-tokens // 16))


def gram_sq_norms(x: Halves, g: Halves, bias: bool) -> Tensor:
    """(L, B) squared norms of g^T x for layers of one shape, and of sum_t g_t with `bias`."""
    L, B, _, T, W = x.stack_LB2TW.shape
    V, device = g.stack_LB2TW.shape[4], x.stack_LB2TW.device
    block = min(MAX_BLOCK, max(16, triton.next_power_of_2(T)))
    blocks = triton.cdiv(T, block)
    pairs = blocks * (blocks + 1) // 2
    share = V if V <= 2 * SHARE else SHARE
    shares = triton.cdiv(V, share)
    ones_LB = x.inverse_LB.reciprocal().square() if bias else torch.zeros_like(x.inverse_LB)
    out = torch.empty(L, B, shares, pairs, dtype=torch.float32, device=device)
    x_squares = torch.empty(L, B, T, dtype=torch.float32, device=device)
    g_squares = torch.empty(L, B, shares, T, dtype=torch.float32, device=device)
    stage_bytes = 2 * (1 if blocks == 1 else 2) * block * STEP * 2
    split_gram_kernel[(pairs, B, L * shares)](
        x.stack_LB2TW, g.stack_LB2TW, ones_LB, out, x_squares, g_squares, B, T, W, V, shares, share,
        X_LOW_FIRST=x.low_first, G_LOW_FIRST=g.low_first, ONE_PAIR=blocks == 1, BLOCK=block,
        STEP=STEP, EVEN=T % block == 0, num_warps=NUM_WARPS,
        num_stages=stages_that_fit(NUM_STAGES, stage_bytes, device),
    )  # fmt: skip
    # Scaled numbers may be as large as 2^15, and a scale as small as 2^-126.
    inverse_LB = x.inverse_LB.double() * g.inverse_LB.double()
    squares_LB = out.double().sum((2, 3)) * inverse_LB.square()
    lengths_LBT = x_squares.double() * g_squares.double().sum(2)
    reach_LB = lengths_LBT.clamp_(min=0.0).sqrt_().sum(2) * inverse_LB
    of_norm, of_sum = cut_off(T, W, min(V, share))
    squares_LB = squares_LB.clamp_(min=0.0) + of_norm * reach_LB.square()
    return (squares_LB.sqrt_() + of_sum * reach_LB).square_().float()
