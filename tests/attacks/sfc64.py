"""The generator this library used until November 2026, kept as the attack's control.

Every 2^19 coordinates of a release, a piece, took their noise from one SFC64 stream of numpy. A
piece of `size` numbers uses the stream's first ceil(size / 2) outputs, cut into halves of 32 bits,
low half first. The first ceil(size / 2) halves are radii, the rest are angles; number i of the
first half of the piece is the cosine part of pair i, and of the second half the sine part.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

# numpy counts from 1 and throws twelve outputs away.
FIRST_COUNTER = 13
_ALL_BITS = (1 << 64) - 1
_INVERSE_OF_9 = pow(9, -1, 1 << 64)


class State(NamedTuple):
    """SFC64: four words of 64 bits, the last a counter."""

    a: int
    b: int
    c: int
    counter: int


def generator(state: State) -> np.random.Generator:
    """numpy's generator in a given state."""
    bits = np.random.SFC64()
    bits.state = {
        "bit_generator": "SFC64",
        "state": {"state": np.array(state, dtype=np.uint64)},
        "has_uint32": 0,
        "uinteger": 0,
    }
    return np.random.Generator(bits)


def unmix(mixed: int) -> int:
    """The y of y ^ (y >> 11)."""
    return mixed ^ mixed >> 11 ^ mixed >> 22 ^ mixed >> 33 ^ mixed >> 44 ^ mixed >> 55


def before(state: State) -> State:
    """The state one output earlier: every operation of SFC64 can be undone."""
    a, b, c, counter = state
    old_b = unmix(a)
    old_c = b * _INVERSE_OF_9 & _ALL_BITS
    output = c - (old_c << 24 | old_c >> 40) & _ALL_BITS
    old_counter = counter - 1 & _ALL_BITS
    return State(output - old_b - old_counter & _ALL_BITS, old_b, old_c, old_counter)


def standard_normal(rng: np.random.Generator, size: int) -> NDArray[np.float32]:
    """The noise of one piece, in units of its standard deviation, by the Box-Muller transform."""
    pairs = -(-size // 2)
    words = rng.integers(0, _ALL_BITS, size=pairs, dtype=np.uint64, endpoint=True).view(np.uint32)
    fine = words[:pairs] >> np.uint32(1)
    u = fine.astype(np.float32) + np.float32(0.5)
    tiny = np.flatnonzero(fine < 1 << 16)
    if tiny.size:
        finer = (rng.integers(0, _ALL_BITS, size=tiny.size, dtype=np.uint64) + 0.5) * 2.0**-64
        u[tiny] = fine[tiny] + finer
    radius = np.sqrt(np.float32(-2.0) * np.log(u * np.float32(2.0**-31)))
    angle = words[pairs:].view(np.int32).astype(np.float32) * np.float32(math.pi * 2.0**-31)
    return np.concatenate([np.cos(angle) * radius, np.sin(angle) * radius])[:size]
