"""Which route computes a linear map's per-sample norms, decided from the shape of every call.

For T positions, R rows and C columns of the weight, per sample:

- Gram:        2·T²·(R + C) operations for the norm, half of that where symmetry is used, then
               2·T·R·C for the clipped sum
- tiles:       2·T·R·C for the norm (tiles of the gradient, never stored), then 2·T·R·C again
- instantiate: 2·T·R·C once, and R·C numbers written and read back once or twice

Memory traffic is counted in operations: how many a device does while it moves one float32 number
three times. On an H200 that is some 1800. The rule counts more, because storing takes a dozen
launches per layer during the backward. Tiles are settled together and replayed, so they take none.
Up to 4096 tokens a step waits for the host to make those launches.

On a CPU a number costs far fewer operations. There one of the two Gram matrices, that of the
narrower side, is computed in float64 at twice the price, and products this small run at four fifths
of the speed of large ones (`kernels/host.py`; AMD Zen 4, MKL).

On an accelerator each pair of blocks of tokens is multiplied once, as Gram matrices are symmetric.

On a Hopper (`kernels/gluon/squares.py`), tiles of many tokens run at 630 to 670 TFLOP/s and Gram
matrices at 550 to 570. There the gradients of a head tied to a table are worth storing much
earlier. A number is stored and read back in 1.7 ps, its square comes for free, and the products
with the table's gradient are read off (benchmarks/reports, GPT-2 at 8x1024).
"""

from __future__ import annotations

from enum import Enum
from typing import Protocol

OPERATIONS_PER_NUMBER = 8192
OPERATIONS_PER_NUMBER_ON_CPU = 160
OPERATIONS_PER_TIED_NUMBER = 1200
# Stored gradients may take up to so many times the memory of the captures they replace.
MEMORY_RATIO, MEMORY_RATIO_ON_CPU = 0.5, 2.0
# There is only one such head in a model.
MEMORY_RATIO_IF_TIED = 0.8
# The cost of an operation for Gram matrices on a Hopper, in percent of one for tiles.
GRAM_PERCENT = 115
# Tokens of a block on an accelerator, where each pair of blocks is multiplied once.
SYMMETRIC_BLOCK = 128


class NormRoute(Enum):
    """How the squared norm of g^T x is found."""

    GRAM = "gram"
    TILES = "tiles"
    INSTANTIATE = "instantiate"


class Chooser(Protocol):
    """The route for T positions, R rows and C columns.

    `device` is the kind of device (`kernels.kind_of`): "cpu", "cuda", or "hopper" for half
    precision there. `tied` says that the weight is an embedding's too.
    """

    def __call__(self, T: int, R: int, C: int, device: str, tied: bool = False) -> NormRoute: ...


def operations(T: int, R: int, C: int, device: str, tied: bool = False) -> tuple[int, int, int]:
    """What each route costs a sample beyond one product g^T x: (Gram, tiles, instantiate)."""
    tiles = 2 * T * R * C
    if device == "cpu":
        gram = 5 * T * T * (2 * min(R, C) + max(R, C)) // 2
        return gram, tiles, OPERATIONS_PER_NUMBER_ON_CPU * R * C
    gram = T * (T + min(T, SYMMETRIC_BLOCK)) * (R + C)
    if device != "hopper":
        return gram, tiles, OPERATIONS_PER_NUMBER * R * C
    a_number = OPERATIONS_PER_TIED_NUMBER if tied else OPERATIONS_PER_NUMBER
    return gram * GRAM_PERCENT // 100, tiles, a_number * R * C


def cheapest(T: int, R: int, C: int, device: str, tied: bool = False) -> NormRoute:
    """The route with the fewest operations; instantiation only where its memory is bounded.

    >>> cheapest(128, 768, 3072, "cuda"), cheapest(8192, 768, 768, "cuda")
    (<NormRoute.GRAM: 'gram'>, <NormRoute.INSTANTIATE: 'instantiate'>)
    >>> cheapest(1024, 50257, 768, "cuda"), cheapest(1440, 50257, 768, "cuda")
    (<NormRoute.GRAM: 'gram'>, <NormRoute.TILES: 'tiles'>)
    >>> cheapest(1024, 768, 3072, "hopper"), cheapest(1024, 50257, 768, "hopper", tied=True)
    (<NormRoute.TILES: 'tiles'>, <NormRoute.INSTANTIATE: 'instantiate'>)
    >>> cheapest(64, 256, 8192, "cpu"), cheapest(512, 768, 768, "cpu")
    (<NormRoute.GRAM: 'gram'>, <NormRoute.INSTANTIATE: 'instantiate'>)
    """
    gram, tiles, stored = operations(T, R, C, device, tied)
    ratio = MEMORY_RATIO_ON_CPU if device == "cpu" else MEMORY_RATIO
    if device == "hopper" and tied:
        ratio = MEMORY_RATIO_IF_TIED
    fits = ratio * T * (R + C) >= R * C
    if stored < min(gram, tiles) and fits:
        return NormRoute.INSTANTIATE
    return NormRoute.GRAM if gram <= tiles else NormRoute.TILES


def mixed(T: int, R: int, C: int, device: str, tied: bool = False) -> NormRoute:
    """The layerwise rule of mixed ghost clipping (Bu et al. 2022): Gram iff 2·T² < R·C.

    >>> mixed(16, 32, 32, "cpu"), mixed(32, 32, 32, "cpu")
    (<NormRoute.GRAM: 'gram'>, <NormRoute.INSTANTIATE: 'instantiate'>)
    """
    return NormRoute.GRAM if 2 * T * T < R * C else NormRoute.INSTANTIATE


def always_gram(T: int, R: int, C: int, device: str, tied: bool = False) -> NormRoute:
    """Ghost clipping: Gram matrices whatever the shape."""
    return NormRoute.GRAM


def always_instantiate(T: int, R: int, C: int, device: str, tied: bool = False) -> NormRoute:
    """Opacus-style per-sample gradients whatever the shape."""
    return NormRoute.INSTANTIATE


STRATEGIES: dict[str, Chooser] = {
    "bookkeeping": cheapest,
    "ghost": always_gram,
    "mixed": mixed,
    "instantiate": always_instantiate,
}
