"""Pairs of neighbouring outputs whose shuffled-Gaussian likelihood can be evaluated exactly.

The mechanism adds N(0, σ²) to a vector and shuffles all d coordinates uniformly, the ideal the
paper's theorem assumes. Its density is a mean over the distinct arrangements of the vector: d of
them when one entry is odd (the theorem's own worst case), one when all are equal. A pair draws
privacy losses log p(y)/p'(y) with y from either world.

Legend: f, f' the two vectors; a world is "first" (f) or "second" (f').
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from shuffled_dpsgd.accounting.theorem import check_theorem
from shuffled_dpsgd.errors import require
from shuffled_dpsgd_experiments.examination.order_statistics import draw_sums

Array: TypeAlias = npt.NDArray[np.float64]
World: TypeAlias = Literal["first", "second"]

CHUNK = 2000
WORLDS: tuple[World, World] = ("first", "second")


@dataclass(frozen=True, kw_only=True)
class Pair:
    """f = (odd, base, …, base) and f' likewise, in `dimension` coordinates; d up to 1e9 and more.

    No odd entry is below its base. Both are known up to the order of their entries, and a shuffled
    Gaussian may not tell them apart. log p(y) = −‖y‖²/2σ² − ‖f‖²/2σ² + base·Σy/σ² + log (1/d) Σ_i
    e^{(odd−base)·y_i/σ²}: only two sums over y are needed, and `draw_sums` draws them jointly.
    """

    name: str
    dimension: int
    odd: tuple[float, float]
    base: tuple[float, float]

    @property
    def constant_distance(self) -> float | None:
        """‖f − f'‖ if shuffling changes neither vector, so that the plain Gaussian is exact."""
        if self.dimension > 1 and self.odd != self.base:
            return None
        spread = (self.dimension - 1) * (self.base[0] - self.base[1]) ** 2
        return math.sqrt(spread + (self.odd[0] - self.odd[1]) ** 2)

    def draw_losses(
        self, world: World, noise_multiplier: float, draws: int, rng: np.random.Generator
    ) -> Array:
        """log of the density of `world` over the other's, at draws from `world`."""
        here, sizes = WORLDS.index(world), range(0, draws, CHUNK)
        return np.concatenate(
            [self._losses(here, noise_multiplier, min(CHUNK, draws - at), rng) for at in sizes]
        )

    def _losses(self, here: int, sigma: float, draws: int, rng: np.random.Generator) -> Array:
        # Measured from the drawn world's base, the many equal coordinates are pure noise.
        odd = [value - self.base[here] for value in (self.odd[here], self.odd[1 - here])]
        base = [0.0, self.base[1 - here] - self.base[here]]
        slopes = [(o - b) / sigma for o, b in zip(odd, base, strict=True)]
        others = self.dimension - 1
        first = odd[0] + sigma * rng.standard_normal(draws)
        sums = draw_sums(others, slopes, draws, rng)
        total = first + sigma * sums.linear
        density = []
        for index in range(2):
            norm = odd[index] ** 2 + others * base[index] ** 2
            mixed = np.logaddexp(slopes[index] * first / sigma, sums.log_exponential[:, index])
            density.append((base[index] * total - norm / 2.0) / sigma**2 + mixed)
        return density[0] - density[1]


def spike_pair(dimension: int, batch_clip: float) -> Pair:
    """The theorem's own worst case (Lemma 3): f of norm c' and f + g of norm c' + 1, both along
    (d−1, −1, …, −1)."""
    check_theorem(dimension, batch_clip)
    require(dimension >= 2, "dimension", "at least 2 for a spike pair", dimension)
    unit = 1.0 / math.sqrt(dimension * (dimension - 1.0))
    lengths = (batch_clip, batch_clip + 1.0)
    return Pair(
        name="spike",
        dimension=dimension,
        odd=(lengths[0] * unit * (dimension - 1), lengths[1] * unit * (dimension - 1)),
        base=(-lengths[0] * unit, -lengths[1] * unit),
    )


def constant_pair(dimension: int, batch_clip: float) -> Pair:
    """Equal entries, norms c' and c' + 1: allowed inputs the proof excludes."""
    check_theorem(dimension, batch_clip)
    entries = (batch_clip / math.sqrt(dimension), (batch_clip + 1.0) / math.sqrt(dimension))
    return Pair(name="constant", dimension=dimension, odd=entries, base=entries)
