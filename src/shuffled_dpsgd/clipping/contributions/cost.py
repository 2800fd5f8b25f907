"""How a linear map's per-sample norms are found, decided from the shape of every call.

For T positions, R rows and C columns of the weight, per sample:

- Gram:        2·T²·(R + C) operations for the norm, less where symmetry is used, then 2·T·R·C for
               the clipped sum
- tiles:       2·T·R·C for the norm (tiles of the gradient, never stored), then 2·T·R·C again
- instantiate: 2·T·R·C once, and R·C numbers written and read back once or twice

Memory traffic is counted in operations: how many a device does while it moves one float32 number
three times. On an H200 that is some 1800. The rule counts more, because storing takes a dozen
launches per layer during the backward. Tiles are computed together and replayed, so they take none.
Up to 4096 tokens a step waits for the host to make those launches. There each pair of blocks of
tokens is multiplied once, as Gram matrices are symmetric.

On a CPU a number costs far fewer operations. There one of the two Gram matrices, that of the
narrower side, is computed in float64 at twice the price, and products this small run at four fifths
of the speed of large ones.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

OPERATIONS_PER_NUMBER, OPERATIONS_PER_NUMBER_ON_CPU = 8192, 160
# Stored gradients may take up to so many times the memory of the captures they replace.
MEMORY_RATIO, MEMORY_RATIO_ON_CPU = 0.5, 2.0
# Tokens of a block on an accelerator.
SYMMETRIC_BLOCK = 128


class NormMethod(Enum):
    """How the squared norm of g^T x is found."""

    GRAM = "gram"
    TILES = "tiles"
    INSTANTIATE = "instantiate"


# The method for T positions, R rows and C columns on a type of device.
Chooser = Callable[[int, int, int, str], NormMethod]


def operations(T: int, R: int, C: int, device: str) -> tuple[int, int, int]:
    """What each method costs a sample beyond one product g^T x: (Gram, tiles, instantiate)."""
    tiles = 2 * T * R * C
    if device == "cpu":
        gram = 5 * T * T * (2 * min(R, C) + max(R, C)) // 2
        return gram, tiles, OPERATIONS_PER_NUMBER_ON_CPU * R * C
    gram = T * (T + min(T, SYMMETRIC_BLOCK)) * (R + C)
    return gram, tiles, OPERATIONS_PER_NUMBER * R * C


def cheapest(T: int, R: int, C: int, device: str) -> NormMethod:
    """The method with the fewest operations; instantiation only where its memory is bounded.

    >>> cheapest(128, 768, 3072, "cuda"), cheapest(8192, 768, 768, "cuda")
    (<NormMethod.GRAM: 'gram'>, <NormMethod.INSTANTIATE: 'instantiate'>)
    >>> cheapest(1024, 50257, 768, "cuda"), cheapest(1440, 50257, 768, "cuda")
    (<NormMethod.GRAM: 'gram'>, <NormMethod.TILES: 'tiles'>)
    >>> cheapest(64, 256, 8192, "cpu"), cheapest(512, 768, 768, "cpu")
    (<NormMethod.GRAM: 'gram'>, <NormMethod.INSTANTIATE: 'instantiate'>)
    """
    gram, tiles, stored = operations(T, R, C, device)
    ratio = MEMORY_RATIO_ON_CPU if device == "cpu" else MEMORY_RATIO
    if stored < min(gram, tiles) and ratio * T * (R + C) >= R * C:
        return NormMethod.INSTANTIATE
    return NormMethod.GRAM if gram <= tiles else NormMethod.TILES


def mixed(T: int, R: int, C: int, device: str) -> NormMethod:
    """The layerwise rule of mixed ghost clipping (Bu et al. 2022): Gram iff 2·T² < R·C.

    >>> mixed(16, 32, 32, "cpu"), mixed(32, 32, 32, "cpu")
    (<NormMethod.GRAM: 'gram'>, <NormMethod.INSTANTIATE: 'instantiate'>)
    """
    return NormMethod.GRAM if 2 * T * T < R * C else NormMethod.INSTANTIATE


STRATEGIES: dict[str, Chooser] = {
    "bookkeeping": cheapest,
    "ghost": lambda T, R, C, device: NormMethod.GRAM,
    "mixed": mixed,
    "instantiate": lambda T, R, C, device: NormMethod.INSTANTIATE,
}
