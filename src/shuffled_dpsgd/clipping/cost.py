"""Which route computes a linear map's per-sample norms, decided from the shape of every call.

For T positions, R rows and C columns of the weight, per sample:

- Gram:        2·T²·(R + C) operations for the norm, then 2·T·R·C for the clipped sum
- tiles:       2·T·R·C for the norm (tiles of the gradient, never stored), then 2·T·R·C again
- instantiate: 2·T·R·C once, and R·C numbers written and read back twice

The traffic of the last is weighed by `OPERATIONS_PER_NUMBER`, how many multiply-adds a current
accelerator does while it moves one float32 number three times.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

OPERATIONS_PER_NUMBER = 1800


class Route(Enum):
    """How the squared norm of g^T x is found."""

    GRAM = "gram"
    TILES = "tiles"
    INSTANTIATE = "instantiate"


Chooser = Callable[[int, int, int], Route]


def cheapest(T: int, R: int, C: int) -> Route:
    """The route with the fewest operations; instantiation only where it also saves memory.

    >>> cheapest(128, 768, 3072), cheapest(4096, 768, 768)
    (<Route.GRAM: 'gram'>, <Route.INSTANTIATE: 'instantiate'>)
    """
    gram = 2 * T * T * (R + C)
    tiles = 2 * T * R * C
    stored = OPERATIONS_PER_NUMBER * R * C
    if stored < min(gram, tiles) and 2 * R * C <= T * (R + C):
        return Route.INSTANTIATE
    return Route.GRAM if gram <= tiles else Route.TILES


def mixed(T: int, R: int, C: int) -> Route:
    """The layerwise rule of mixed ghost clipping (Bu et al. 2022): Gram iff 2·T² < R·C.

    >>> mixed(16, 32, 32), mixed(32, 32, 32)
    (<Route.GRAM: 'gram'>, <Route.INSTANTIATE: 'instantiate'>)
    """
    return Route.GRAM if 2 * T * T < R * C else Route.INSTANTIATE


def always_gram(T: int, R: int, C: int) -> Route:
    """Ghost clipping: Gram matrices whatever the shape."""
    return Route.GRAM


def always_instantiate(T: int, R: int, C: int) -> Route:
    """Opacus-style per-sample gradients whatever the shape."""
    return Route.INSTANTIATE


STRATEGIES: dict[str, Chooser] = {
    "bookkeeping": cheapest,
    "ghost": always_gram,
    "mixed": mixed,
    "instantiate": always_instantiate,
}
