"""Norms of very wide linear layers on a GPU by Gram matrices, such as a vocabulary head's.

Shapes: B samples, T tokens in blocks of K, N pairs (i, j) of blocks with i <= j, S shares of the
wide side's W features, D features of the other side. Operands as in `linear`.

A Gram matrix is symmetric, so every pair of blocks is multiplied once. There are too few samples
and pairs to keep a GPU busy, so the features are divided into shares. One launch writes the blocks
of each share, which take little room beside the gradient itself. Another adds them up in a fixed
order and multiplies them with the other side's, entry by entry.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from shuffled_dpsgd.clipping.kernels import plain
from shuffled_dpsgd.clipping.kernels.triton.device_limits import multiprocessors
from shuffled_dpsgd.clipping.kernels.triton.linear import (
    STEP,
    blocks_of,
    gram_block,
    gram_stages,
)

# The room that the blocks of all shares may take, unless a single share needs more.
MAX_STORED_BYTES = 96 << 20
# Matrix units add up at most so many features times tokens at a stretch. What they may cut off is
# counted in, and so stays within 2^21 / 2^27, or 1.6 %, of a squared norm.
MAX_STRETCH = 1 << 21


def even_parts(samples: int, at_a_time: int, most: int = 16) -> int:
    """Into how many parts, at most `most`, each sample is cut so that the last round is full too.

    >>> even_parts(32, 132), even_parts(64, 132), even_parts(1, 132), even_parts(288, 132, 5)
    (4, 2, 16, 5)
    """
    parts = range(1, most + 1)
    return min(parts, key=lambda number: (-(-samples * number // at_a_time) / number, number))


@dataclass(frozen=True, kw_only=True)
class Cut:
    """How the whole steps of W features are dealt out; what is left of a step is the tail.

    `share` and `stretch` are multiples of STEP: features of a program, and those that its matrix
    units add up before the sum is rounded as usual.
    """

    parts: int
    share: int
    stretch: int
    whole: int

    @property
    def width(self) -> int:
        """As many features added up at a stretch cut off as much as all steps here may lose.

        The tail is one more step, and each stretch is added with half a unit of rounding.
        """
        return self.stretch + STEP + 8 * self.parts * -(-self.share // self.stretch)


def cut(width: int, tokens: int, blocks: int, block_bytes: int, at_a_time: int) -> Cut:
    """Shares of the features for `blocks` Gram matrices of `block_bytes` each.

    >>> cut(50257, 1024, 288, 65536, 132)
    Cut(parts=5, share=10048, stretch=2048, whole=50240)
    """
    most = max(1, min(16, MAX_STORED_BYTES // (blocks * block_bytes)))
    whole = width // STEP * STEP
    share = _rounded(-(-whole // even_parts(blocks, at_a_time, most)))
    stretches = -(-share * tokens // MAX_STRETCH)
    return Cut(
        parts=max(1, -(-whole // share)),
        share=share,
        stretch=_rounded(-(-share // stretches)),
        whole=whole,
    )


def _rounded(features: int) -> int:
    return max(1, -(-features // STEP)) * STEP


@triton.jit
def pair_of(number):  # type: ignore[no-untyped-def]
    """The pairs i <= j one after the other: (0, 0), (0, 1), (1, 1), (0, 2), ..."""
    j = ((tl.sqrt(8.0 * number + 1.0) - 1.0) * 0.5).to(tl.int32)
    # The root is rounded, perhaps across a whole number.
    j += tl.where((j + 1) * (j + 2) // 2 <= number, 1, 0)
    j -= tl.where(j * (j + 1) // 2 > number, 1, 0)
    return number - j * (j + 1) // 2, j


@triton.jit
def tokens_of(number, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The tokens of a block, wide enough to be multiplied by the stride of any tensor."""
    return number.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def gram_in_stretches(  # type: ignore[no-untyped-def]
    base, rows, cols, T, first, end, stretch, stride, SAME: tl.constexpr, ONE: tl.constexpr,
    BLOCK: tl.constexpr, STEP: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """`gram_block` of the features from `first` to `end`; ONE says that it is a single stretch."""
    if ONE:
        width = tl.multiple_of(end - first, STEP)
        total = gram_block(base + first, rows, cols, T, width, stride, SAME, BLOCK, STEP, EVEN)
    else:
        total = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
        for at in range(first, end, stretch):
            at = tl.multiple_of(at, STEP)
            width = tl.multiple_of(tl.minimum(stretch, end - at), STEP)
            total += gram_block(base + at, rows, cols, T, width, stride, SAME, BLOCK, STEP, EVEN)
    return total


@triton.jit
def share_kernel(  # type: ignore[no-untyped-def]
    w, out_SBNKK, T, whole, share, stretch, w_batch, w_row,
    ONE_PAIR: tl.constexpr, ONE: tl.constexpr, EVEN: tl.constexpr, BLOCK: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """<w_t, w_s> over one share of the features, for one pair of blocks of tokens of one sample."""
    pair, part, sample = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    i, j = pair_of(pair)
    rows = tokens_of(i, BLOCK)
    cols = tokens_of(j, BLOCK)
    first = tl.multiple_of(part * share, STEP)
    end = tl.multiple_of(tl.minimum(first + share, whole), STEP)
    w += sample * w_batch
    # A single pair needs no room for two blocks of tokens, and that is known when compiling.
    if ONE_PAIR:  # noqa: SIM114
        gram = gram_in_stretches(
            w, rows, cols, T, first, end, stretch, w_row, True, ONE, BLOCK, STEP, EVEN
        )
    elif i == j:
        gram = gram_in_stretches(
            w, rows, cols, T, first, end, stretch, w_row, True, ONE, BLOCK, STEP, EVEN
        )
    else:
        gram = gram_in_stretches(
            w, rows, cols, T, first, end, stretch, w_row, False, ONE, BLOCK, STEP, EVEN
        )
    block = (part * tl.num_programs(2) + sample) * tl.num_programs(0) + pair
    k = tl.arange(0, BLOCK)
    tl.store(out_SBNKK + block * BLOCK * BLOCK + k[:, None] * BLOCK + k[None, :], gram)


@triton.jit(do_not_specialize=["num_parts"])
def pair_kernel(  # type: ignore[no-untyped-def]
    n, w, parts_SBNKK, out_BN2, T, D, whole, W, num_parts, n_batch, n_row, w_batch, w_row,
    N_ONE: tl.constexpr, W_ONE: tl.constexpr, ONE_PAIR: tl.constexpr, TAIL: tl.constexpr,
    EVEN: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """One pair of blocks of one sample: the sum of <n_t, n_s> <w_t, w_s>.

    Beside it the sum of |n_t| |w_t|, the length of all the terms that may cancel. N_ONE and W_ONE
    are one for the side that a bias gives one more feature.
    """
    pair, sample = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i, j = pair_of(pair)
    rows = tokens_of(i, BLOCK)
    cols = tokens_of(j, BLOCK)
    k = tl.arange(0, BLOCK)
    block = sample * tl.num_programs(0) + pair
    stored = parts_SBNKK + block * BLOCK * BLOCK + k[:, None] * BLOCK + k[None, :]
    n_gram = gram_block(n + sample * n_batch, rows, cols, T, D, n_row, ONE_PAIR, BLOCK, STEP, EVEN)
    w_gram = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    if TAIL:
        # A mask that may end anywhere keeps loads from being wide: it is for these features alone.
        w_gram = gram_block(
            w + sample * w_batch + whole, rows, cols, T, W - whole, w_row, ONE_PAIR, BLOCK, STEP,
            False,
        )  # fmt: skip
    each = tl.num_programs(1).to(tl.int64) * tl.num_programs(0) * BLOCK * BLOCK
    for part in range(num_parts):
        w_gram += tl.load(stored + part * each)
    # Tokens past the end have zeros on the side without a one; off the diagonal pairs count twice.
    products = (n_gram + N_ONE) * (w_gram + W_ONE)
    total = tl.sum(products)
    tl.store(out_BN2 + 2 * block, tl.where(i == j, total, 2.0 * total))
    lengths = tl.where(rows[:, None] == cols[None, :], tl.sqrt(tl.maximum(products, 0.0)), 0.0)
    tl.store(out_BN2 + 2 * block + 1, tl.sum(lengths))


def gram_sq_norms(x_BTD: Tensor, g_BTP: Tensor, bias: bool) -> Tensor:
    """`plain.gram_sq_norms` of one layer with very many inputs or outputs."""
    wider = x_BTD.shape[2] > g_BTP.shape[2]
    n, w = (g_BTP, x_BTD) if wider else (x_BTD, g_BTP)
    (B, T, D), W = n.shape, w.shape[2]
    block, num_blocks = blocks_of(T)
    pairs = num_blocks * (num_blocks + 1) // 2
    by = cut(W, T, B * pairs, 4 * block * block, multiprocessors(w.device))
    stored = torch.empty(by.parts, B, pairs, block, block, dtype=torch.float32, device=w.device)
    out = torch.empty(B, pairs, 2, dtype=torch.float32, device=w.device)
    num_warps, even = 8 if block == 128 else 4, T % block == 0
    stages = gram_stages(block, num_blocks, w)
    share_kernel[(pairs, by.parts, B)](
        w, stored, T, by.whole, by.share, by.stretch, w.stride(0), w.stride(1),
        ONE_PAIR=pairs == 1, ONE=by.stretch >= by.share, EVEN=even, BLOCK=block, STEP=STEP,
        num_warps=num_warps, num_stages=stages,
    )  # fmt: skip
    pair_kernel[(pairs, B)](
        n, w, stored, out, T, D, by.whole, W, by.parts,
        n.stride(0), n.stride(1), w.stride(0), w.stride(1),
        N_ONE=float(bias and not wider), W_ONE=float(bias and wider), ONE_PAIR=pairs == 1,
        TAIL=by.whole < W, EVEN=even and D % STEP == 0, BLOCK=block, STEP=STEP,
        num_warps=num_warps, num_stages=stages,
    )  # fmt: skip
    squares_B, reach_B = out.sum(1).unbind(1)
    return plain.above_cut_off(squares_B, reach_B, D, by.width, dtype=w.dtype)
