"""Noise and division on a GPU, in one pass over the sums.

Coordinate i of a step gets a number that is a function of (key, i) alone: Philox4x32-10 makes
four words for four coordinates, and two Box-Muller transforms make four normal numbers of them.
Coordinates are taken in blocks of 4 x 1024; the words of counter c serve the coordinates at
c mod 1024 of each of the four rows of block c // 1024, so that reads and writes are consecutive.

The radius comes from 32 bits, and 32 more wherever the first 16 are zero, so that it is as fine-
grained far out as at the centre and reaches 9.5 standard deviations; a normal number lies beyond
with probability 3e-21. The angle comes from 32 bits. Everything is float32.

The key has 128 bits: Philox's own 64, and two words of its counter, which leaves 63 bits to count.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

LANES = tl.constexpr(1024)
BLOCK = tl.constexpr(4096)
# Radius words below this are refined.
TINY = tl.constexpr(1 << 16)
# The middle of a word, for those that are not, and the bit that marks counters of refinements.
HALF = tl.constexpr(1 << 31)
PER_WORD = tl.constexpr(2.0**-32)
PER_TWO_WORDS = tl.constexpr(2.0**-64)
EIGHTH_TURN = tl.constexpr(math.pi / 4 * 2.0**-31)
# sin(x) = x + x^3 (S0 + S1 x^2 + ...) and cos(x) = 1 + x^2 (C0 + C1 x^2 + ...) for |x| <= pi/4, the
# best coefficients there are for an eighth of a turn: within 7e-8 in float32.
S0, S1, S2 = (tl.constexpr(c) for c in (-0.1666665067, 0.008331978663, -0.0001949563617))
C0, C1, C2, C3 = (
    tl.constexpr(c) for c in (-0.4999999973, 0.04166662332, -0.001388676379, 2.439045066e-05)
)


def add_normal_(
    flat: Tensor, *, key: tuple[int, int, int, int], first: int, std: float, divide_by: float
) -> None:
    """flat = (flat + std * normal) / divide_by in place, for the coordinates from `first` on.

    `flat` is a contiguous float32 vector, `key` four secret words of 32 bits.
    """
    count = flat.numel()
    blocks = -(-(first + count) // BLOCK.value) - first // BLOCK.value
    # As signed numbers all words have one type, whatever their values: no second compilation.
    words = [word - (1 << 32) if word >> 31 else word for word in key]
    with torch.cuda.device_of(flat):
        _add_normal_kernel[(blocks,)](flat, count, first, *words, std, 1.0 / divide_by, num_warps=8)


@triton.jit
def _normal_pair(word, finer, angle):  # type: ignore[no-untyped-def]
    """sqrt(-2 log u) times cosine and sine of an angle; u = (word + finer / 2^32) / 2^32.

    u is never zero and rounds to 1 at most, where the hardware's logarithm may be positive by its
    error. Thirty bits of `angle` make an x in [-pi/4, pi/4); x + pi/4 is an angle in a quarter of
    the circle, whose cosine is (cos x - sin x) / sqrt(2); two bits choose the quarter.
    """
    u = word.to(tl.float32) * PER_WORD + (finer.to(tl.float32) + 0.5) * PER_TWO_WORDS
    radius = tl.sqrt(tl.maximum(-tl.log(u), 0.0))
    x = (angle << 2).to(tl.int32, bitcast=True).to(tl.float32) * EIGHTH_TURN
    z = x * x
    sine = x + x * z * (S0 + z * (S1 + z * S2))
    cosine = 1.0 + z * (C0 + z * (C1 + z * (C2 + z * C3)))
    first = (radius * (cosine - sine)).to(tl.uint32, bitcast=True) ^ (angle & HALF)
    second = (radius * (cosine + sine)).to(tl.uint32, bitcast=True) ^ ((angle << 1) & HALF)
    return first.to(tl.float32, bitcast=True), second.to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["key_0", "key_1", "key_2", "key_3"])
def _add_normal_kernel(  # type: ignore[no-untyped-def]
    sums, count, first, key_0, key_1, key_2, key_3, std, scale
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64) + first // BLOCK
    # Where the block starts in `sums`: before it, when the first block is not whole.
    start = block * BLOCK - first
    low = tl.maximum(-start, 0).to(tl.int32)
    high = tl.minimum(count - start, BLOCK).to(tl.int32)
    lane = tl.arange(0, LANES)
    in_0 = (lane >= low) & (lane < high)
    in_1 = (lane + LANES >= low) & (lane + LANES < high)
    in_2 = (lane + 2 * LANES >= low) & (lane + 2 * LANES < high)
    in_3 = (lane + 3 * LANES >= low) & (lane + 3 * LANES < high)
    row_0 = sums + start + lane
    row_1 = row_0 + LANES
    row_2 = row_0 + 2 * LANES
    row_3 = row_0 + 3 * LANES
    # Before the arithmetic, which then hides how long reading takes.
    sum_0 = tl.load(row_0, mask=in_0)
    sum_1 = tl.load(row_1, mask=in_1)
    sum_2 = tl.load(row_2, mask=in_2)
    sum_3 = tl.load(row_3, mask=in_3)

    group = block * LANES
    zeros = tl.zeros((LANES,), dtype=tl.uint32)
    # LANES divides 2^32: the low word never overflows within a block.
    c0 = (group & 0xFFFFFFFF).to(tl.uint32) + tl.arange(0, LANES).to(tl.uint32)
    c1 = zeros + (group >> 32).to(tl.uint32)
    c2 = zeros + key_2.to(tl.uint32, bitcast=True)
    c3 = zeros + key_3.to(tl.uint32, bitcast=True)
    low_key = key_0.to(tl.uint32, bitcast=True).to(tl.uint64)
    key = low_key | (key_1.to(tl.uint32, bitcast=True).to(tl.uint64) << 32)
    w0, w1, w2, w3 = tl.philox(key, c0, c1, c2, c3)

    finer_0 = zeros + HALF
    finer_2 = finer_0
    if tl.max((tl.minimum(w0, w2) < TINY).to(tl.int32)) > 0:
        t0, _, t2, _ = tl.philox(key, c0, c1 | HALF, c2, c3)
        finer_0 = tl.where(w0 < TINY, t0, finer_0)
        finer_2 = tl.where(w2 < TINY, t2, finer_2)
    normal_0, normal_1 = _normal_pair(w0, finer_0, w1)
    normal_2, normal_3 = _normal_pair(w2, finer_2, w3)
    tl.store(row_0, (sum_0 + std * normal_0) * scale, mask=in_0)
    tl.store(row_1, (sum_1 + std * normal_1) * scale, mask=in_1)
    tl.store(row_2, (sum_2 + std * normal_2) * scale, mask=in_2)
    tl.store(row_3, (sum_3 + std * normal_3) * scale, mask=in_3)
