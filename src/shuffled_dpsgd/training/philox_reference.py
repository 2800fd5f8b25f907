"""What noise the GPU kernel has to make, in numpy and float64: slow, and the definition.

See `triton_noise` for the layout of keys, counters and blocks.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]
Key = tuple[int, int, int, int]

LANES = 1024
BLOCK = 4 * LANES
# Radius words below this are refined.
TINY = 1 << 16
_MASK = np.uint64(0xFFFFFFFF)


def philox(counter: list[Words], key: tuple[int, int]) -> list[Words]:
    """Philox4x32-10 (Salmon et al. 2011), words as uint64."""
    c = [word.astype(np.uint64) for word in counter]
    k0, k1 = key
    for _ in range(10):
        p0, p1 = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        high_0, high_1 = p0 >> np.uint64(32), p1 >> np.uint64(32)
        c = [high_1 ^ c[1] ^ np.uint64(k0), p1 & _MASK, high_0 ^ c[3] ^ np.uint64(k1), p0 & _MASK]
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c


def expected_normals(key: Key, blocks: range) -> tuple[NDArray[np.float64], int]:
    """What the coordinates of these blocks of 4096 get, and how many radii were refined."""
    groups = np.arange(blocks.start * LANES, blocks.stop * LANES, dtype=np.uint64)
    ones = np.ones_like(groups)
    high, salts = groups >> np.uint64(32), [ones * np.uint64(key[2]), ones * np.uint64(key[3])]
    words = philox([groups & _MASK, high, *salts], key[:2])
    finer = philox([groups & _MASK, high | np.uint64(1 << 31), *salts], key[:2])
    rows = []
    refined = 0
    for radius_word, angle_word in ((0, 1), (2, 3)):
        tiny = words[radius_word] < TINY
        refined += int(tiny.sum())
        low = np.where(tiny, finer[radius_word], 1 << 31)
        u = words[radius_word] * 2.0**-32 + (low + 0.5) * 2.0**-64
        radius, turn = np.sqrt(-2 * np.log(u)), words[angle_word].astype(np.uint32)
        angle = math.pi / 4 * (1 + (turn << np.uint32(2)).view(np.int32) * 2.0**-31)
        for part, bit in ((np.cos(angle), 31), (np.sin(angle), 30)):
            rows.append(radius * part * np.where(turn >> np.uint32(bit) & 1, -1, 1))
    return np.stack(rows).reshape(4, -1, LANES).transpose(1, 0, 2).reshape(-1), refined
