"""The core's noise on a GPU, in one pass over the sums: draw, add, divide.

`core/noise.py` defines the number of every coordinate, and this kernel computes it for float32
sums. A program serves a part of a tile: 2048 pairs, whose words A, B and C are 128 ChaCha20 blocks
of each of three streams. A lane computes whole blocks, so that nothing is exchanged between lanes
while the 20 rounds run; joining their words takes a few exchanges, for which small programs wait
least. Logarithm, sine and cosine are within a few roundings of those on the CPU.

The key is an argument of the launch and is written to no memory of ours.
"""

from __future__ import annotations

import math

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from shuffled_dpsgd.core import noise, streams

LANES = tl.constexpr(noise.LANES)
TILE = tl.constexpr(2 * noise.LANES)
BLOCKS = tl.constexpr(128)
PAIRS = tl.constexpr(128 * streams.WORDS_PER_BLOCK)
PARTS = tl.constexpr(noise.LANES // (128 * streams.WORDS_PER_BLOCK))
LOW_BITS = tl.constexpr((1 << 31) - 1)
PER_WORD = tl.constexpr(2.0**-31)
HALF_TURN = tl.constexpr(math.pi * 2.0**-31)
# "expand 32-byte k" (RFC 8439, section 2.3).
E0, E1, E2, E3 = (tl.constexpr(w) for w in (0x61707865, 0x3320646E, 0x79622D32, 0x6B206574))
# sin(x) = x + x^3 (S0 + S1 x^2 + ...) and cos(x) = 1 + x^2 (C0 + C1 x^2 + ...) for |x| <= pi/4, the
# best coefficients there are for an eighth of a turn: within 7e-8 in float32.
S0, S1, S2 = (tl.constexpr(c) for c in (-0.1666665067, 0.008331978663, -0.0001949563617))
C0, C1, C2, C3 = (
    tl.constexpr(c) for c in (-0.4999999973, 0.04166662332, -0.001388676379, 2.439045066e-05)
)


def add_normal_(
    flat: Tensor, *, key: bytes, place: noise.Place, std: float, divide_by: float
) -> None:
    """flat = (flat + std * normal) / divide_by in place, from `place` on; contiguous float32."""
    count, first = flat.numel(), place.first
    assert flat.dtype == torch.float32
    assert flat.is_contiguous()
    assert (first + count) // 2 < streams.MOST_WORDS - noise.LANES, "the stream's counter is full"
    tiles = -(-(first + count) // TILE.value) - first // TILE.value
    # As signed words. Triton gives a large unsigned one another type, and would compile again.
    words = np.frombuffer(key, dtype="<i4").tolist()
    with torch.cuda.device_of(flat):
        _add_normal_kernel[(tiles * PARTS.value,)](
            flat, count, first, place.group, *words, std, 1.0 / divide_by, num_warps=4
        )


@triton.jit
def _quarter_round(a, b, c, d):  # type: ignore[no-untyped-def]
    a += b
    d ^= a
    d = (d << 16) | (d >> 16)
    c += d
    b ^= c
    b = (b << 12) | (b >> 20)
    a += b
    d ^= a
    d = (d << 8) | (d >> 24)
    c += d
    b ^= c
    b = (b << 7) | (b >> 25)
    return a, b, c, d


@triton.jit
def _chacha_block(counter, stream, group, k0, k1, k2, k3, k4, k5, k6, k7):  # type: ignore[no-untyped-def]  # fmt: skip
    """The 16 words of each block that `counter` names; the nonce is (stream, group, 0)."""
    zeros = counter * 0
    x0, x1, x2, x3 = zeros + E0, zeros + E1, zeros + E2, zeros + E3
    x4, x5, x6, x7 = zeros + k0, zeros + k1, zeros + k2, zeros + k3
    x8, x9, x10, x11 = zeros + k4, zeros + k5, zeros + k6, zeros + k7
    x12, x13, x14, x15 = counter, zeros + stream, zeros + group, zeros
    for _ in range(10):
        x0, x4, x8, x12 = _quarter_round(x0, x4, x8, x12)
        x1, x5, x9, x13 = _quarter_round(x1, x5, x9, x13)
        x2, x6, x10, x14 = _quarter_round(x2, x6, x10, x14)
        x3, x7, x11, x15 = _quarter_round(x3, x7, x11, x15)
        x0, x5, x10, x15 = _quarter_round(x0, x5, x10, x15)
        x1, x6, x11, x12 = _quarter_round(x1, x6, x11, x12)
        x2, x7, x8, x13 = _quarter_round(x2, x7, x8, x13)
        x3, x4, x9, x14 = _quarter_round(x3, x4, x9, x14)
    return (
        x0 + E0, x1 + E1, x2 + E2, x3 + E3, x4 + k0, x5 + k1, x6 + k2, x7 + k3,
        x8 + k4, x9 + k5, x10 + k6, x11 + k7, x12 + counter, x13 + stream, x14 + group, x15,
    )  # fmt: skip


@triton.jit
def _stream_words(counter, stream, group, k0, k1, k2, k3, k4, k5, k6, k7):  # type: ignore[no-untyped-def]  # fmt: skip
    """The words of these blocks, one block after the other."""
    w0, w1, w2, w3, w4, w5, w6, w7, w8, w9, w10, w11, w12, w13, w14, w15 = _chacha_block(
        counter, stream, group, k0, k1, k2, k3, k4, k5, k6, k7
    )
    # A join adds an axis at the end: the one made last counts the words one by one.
    w_0_4_8_12 = tl.join(tl.join(w0, w8), tl.join(w4, w12))
    w_1_5_9_13 = tl.join(tl.join(w1, w9), tl.join(w5, w13))
    w_2_6_10_14 = tl.join(tl.join(w2, w10), tl.join(w6, w14))
    w_3_7_11_15 = tl.join(tl.join(w3, w11), tl.join(w7, w15))
    even, odd = tl.join(w_0_4_8_12, w_2_6_10_14), tl.join(w_1_5_9_13, w_3_7_11_15)
    return tl.join(even, odd).reshape(16 * counter.shape[0])


@triton.jit
def _normal_pairs(a, b, c):  # type: ignore[no-untyped-def]
    """sqrt(-2 log u) times cosine and sine of a half turn times v, as the core defines u and v.

    u is never zero and rounds to 1 at most, where a device's logarithm may be positive by its
    error. The angle is a number of quarter turns and an x in [-pi/4, pi/4), exactly.
    """
    high, low = (a & LOW_BITS).to(tl.float32), (b & LOW_BITS).to(tl.float32)
    u = (high + (low + 0.5) * PER_WORD) * PER_WORD
    radius = tl.sqrt(tl.maximum(-2.0 * tl.log(u), 0.0))
    quarter = (c + (1 << 29)) >> 30
    x = (c - (quarter << 30)).to(tl.int32, bitcast=True).to(tl.float32) * HALF_TURN
    z = x * x
    sine = x + x * z * (S0 + z * (S1 + z * S2))
    cosine = 1.0 + z * (C0 + z * (C1 + z * (C2 + z * C3)))
    is_odd = (quarter & 1) != 0
    first = radius * tl.where(is_odd, sine, cosine)
    second = radius * tl.where(is_odd, cosine, sine)
    # Quarters 1 and 2 are left of the origin, 2 and 3 below it.
    first = tl.where((quarter == 1) | (quarter == 2), -first, first)
    return first, tl.where(quarter >= 2, -second, second)


@triton.jit(do_not_specialize=["group", "k0", "k1", "k2", "k3", "k4", "k5", "k6", "k7"])
def _add_normal_kernel(  # type: ignore[no-untyped-def]
    sums, count, first, group, k0, k1, k2, k3, k4, k5, k6, k7, std, scale
):  # fmt: skip
    tile = tl.program_id(0) // PARTS + first // TILE
    part = tl.program_id(0) % PARTS
    # Where the part starts in `sums`: before it, when the first tile is not whole.
    start = tile.to(tl.int64) * TILE + part * PAIRS - first
    low = tl.maximum(-start, 0).to(tl.int32)
    high = tl.minimum(count - start, TILE).to(tl.int32)
    at = tl.arange(0, PAIRS)
    are_first = (at >= low) & (at < high)
    are_second = (at + LANES >= low) & (at + LANES < high)
    firsts = sums + start + at
    seconds = firsts + LANES
    # Before the arithmetic, which then hides how long reading takes.
    first_sums = tl.load(firsts, mask=are_first)
    second_sums = tl.load(seconds, mask=are_second)

    k0, k1 = k0.to(tl.uint32, bitcast=True), k1.to(tl.uint32, bitcast=True)
    k2, k3 = k2.to(tl.uint32, bitcast=True), k3.to(tl.uint32, bitcast=True)
    k4, k5 = k4.to(tl.uint32, bitcast=True), k5.to(tl.uint32, bitcast=True)
    k6, k7 = k6.to(tl.uint32, bitcast=True), k7.to(tl.uint32, bitcast=True)
    group = group.to(tl.uint32)
    counter = (tile * PARTS + part).to(tl.uint32) * BLOCKS + tl.arange(0, BLOCKS).to(tl.uint32)
    a = _stream_words(counter, 0, group, k0, k1, k2, k3, k4, k5, k6, k7)
    b = _stream_words(counter, 1, group, k0, k1, k2, k3, k4, k5, k6, k7)
    c = _stream_words(counter, 2, group, k0, k1, k2, k3, k4, k5, k6, k7)
    first_normals, second_normals = _normal_pairs(a, b, c)
    tl.store(firsts, (first_sums + std * first_normals) * scale, mask=are_first)
    tl.store(seconds, (second_sums + std * second_normals) * scale, mask=are_second)
