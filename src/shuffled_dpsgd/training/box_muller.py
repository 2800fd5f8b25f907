"""Standard normal numbers on the CPU, as fast as numpy makes them.

float32 numbers come in pairs from the Box-Muller transform, whole arrays at a time. That is three
times as fast as numpy's ziggurat, which makes one number after the other. With only 24 bits for the
radius, no number would exceed 5.8 standard deviations. Here the radius comes from 31 bits, and from
64 more where the first 15 of them are zero. So it is as fine-grained in the tails as at the centre,
and reaches 11.5.

float64 numbers come from the ziggurat, whose tail is exact.

`native_noise` does the same for float32 in compiled C. This module defines what it computes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_ALL_BITS = np.iinfo(np.uint64).max
_FINE_BITS = 31
_TINY = 1 << 16
# Pairs of arrays to work in that no thread uses now: getting fresh memory takes longer than filling
# it.
_free: list[NDArray[np.float32]] = []


class NoisedPart(NamedTuple):
    """Sums side by side, and which of the numbers of a piece they receive, from `first` on."""

    target: NDArray[np.floating]
    first: int
    std: float


def add_normals(
    rng: np.random.Generator, size: int, parts: Sequence[NoisedPart], divide_by: float
) -> None:
    """Draw a piece of `size` numbers, add each part its own times its std, and divide the sums."""
    numbers = standard_normal(rng, size, parts[0].target.dtype)
    for target, first, std in parts:
        noise = numbers[first : first + target.size]
        noise *= std
        target += noise
        target /= divide_by


def standard_normal(
    rng: np.random.Generator, size: int, dtype: np.dtype[np.floating]
) -> NDArray[np.floating]:
    """`size` independent standard normal numbers; all of them depend on `size`."""
    if dtype != np.float32:
        return rng.standard_normal(size, dtype=np.float64)
    pairs = -(-size // 2)
    words = rng.integers(0, _ALL_BITS, size=pairs, dtype=np.uint64, endpoint=True).view(np.uint32)
    held = _free.pop() if _free else np.empty((2, pairs), dtype=np.float32)
    if held.shape[1] < pairs:
        held = np.empty((2, pairs), dtype=np.float32)
    radius, angle = held[:, :pairs]
    _fill_radius(rng, words[:pairs], out=radius)
    # Signed, because vector instructions convert only those; the angle is in [-pi, pi).
    np.copyto(angle, words[pairs:].view(np.int32), casting="unsafe")
    angle *= np.float32(math.pi * 2.0**-31)
    numbers: NDArray[np.float32] = words.view(np.float32)
    np.cos(angle, out=numbers[:pairs])
    np.sin(angle, out=numbers[pairs:])
    numbers.reshape(2, pairs)[:] *= radius
    _free.append(held)
    return numbers[:size]


def _fill_radius(
    rng: np.random.Generator, words: NDArray[np.uint32], *, out: NDArray[np.float32]
) -> None:
    """sqrt(-2 log u) of u = (word / 2 + v) / 2^31, with v uniform where it matters, else 1/2.

    The last bit of a word is dropped, and the words are changed.
    """
    words >>= np.uint32(1)
    np.copyto(out, words.view(np.int32), casting="unsafe")
    out += np.float32(0.5)
    tiny = np.flatnonzero(words < _TINY)
    if tiny.size:
        # In (0, 1), 64 bits of it: the logarithm of zero cannot occur.
        finer = (rng.integers(0, _ALL_BITS, size=tiny.size, dtype=np.uint64) + 0.5) * 2.0**-64
        out[tiny] = words[tiny] + finer
    out *= np.float32(2.0**-_FINE_BITS)
    np.log(out, out=out)
    out *= np.float32(-2.0)
    np.sqrt(out, out=out)
