"""Pairs of neighbouring outputs whose shuffled-Gaussian likelihood can be evaluated exactly.

The mechanism adds N(0, σ²) to a vector and shuffles all d coordinates uniformly, the ideal the
paper's theorem assumes. Its density is a mean over the distinct arrangements of the vector: d of
them when one entry is odd (the theorem's own worst case), one when all are equal, and a permanent
in general, feasible up to ten entries. Each pair draws privacy losses log p(y)/p'(y) with y from
either world.

Legend: f, f' the two vectors; a world is "first" (f) or "second" (f').
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from shuffled_dpsgd.accounting.order_statistics import draw_sums
from shuffled_dpsgd.accounting.theorem import check_theorem
from shuffled_dpsgd.errors import InvalidArgumentError

Array: TypeAlias = npt.NDArray[np.float64]
World: TypeAlias = Literal["first", "second"]

CHUNK = 2000
LARGEST_ARBITRARY = 10
WORLDS: tuple[World, World] = ("first", "second")


class Pair(ABC):
    """Two vectors, known up to their order, that a shuffled Gaussian may not tell apart."""

    name: str
    dimension: int

    @property
    def constant_distance(self) -> float | None:
        """‖f − f'‖ if shuffling changes neither vector, so that the plain Gaussian is exact."""
        return None

    def draw_losses(
        self, world: World, noise_multiplier: float, draws: int, rng: np.random.Generator
    ) -> Array:
        """log of the density of `world` over the other's, at draws from `world`."""
        here, sizes = WORLDS.index(world), range(0, draws, CHUNK)
        return np.concatenate(
            [self.losses(here, noise_multiplier, min(CHUNK, draws - at), rng) for at in sizes]
        )

    @abstractmethod
    def losses(self, here: int, sigma: float, draws: int, rng: np.random.Generator) -> Array:
        """A chunk of them, from the vector of that number."""


@dataclass(frozen=True, kw_only=True)
class OneOddPair(Pair):
    """f = (odd, base, …, base) and f' likewise, in `dimension` coordinates; d up to 1e9 and more.

    log p(y) = −‖y‖²/2σ² − ‖f‖²/2σ² + base·Σy/σ² + log (1/d) Σ_i e^{(odd−base)·y_i/σ²}: only two
    sums over y are needed, and `draw_sums` draws them jointly from order statistics.
    """

    name: str
    dimension: int
    odd: tuple[float, float]
    base: tuple[float, float]

    @property
    def constant_distance(self) -> float | None:
        if self.dimension > 1 and (self.odd[0] != self.base[0] or self.odd[1] != self.base[1]):
            return None
        spread = (self.dimension - 1) * (self.base[0] - self.base[1]) ** 2
        return math.sqrt(spread + (self.odd[0] - self.odd[1]) ** 2)

    def losses(self, here: int, sigma: float, draws: int, rng: np.random.Generator) -> Array:
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


@dataclass(frozen=True, kw_only=True)
class ArbitraryPair(Pair):
    """Any two short vectors, by the permanent of the matrix e^{y_i f_j/σ²}."""

    name: str
    dimension: int
    vectors: tuple[Array, Array]

    def losses(self, here: int, sigma: float, draws: int, rng: np.random.Generator) -> Array:
        y = self.vectors[here] + sigma * rng.standard_normal((draws, self.dimension))
        density = [
            _log_permanent(y[:, :, None] * f / sigma**2) - float(f @ f) / (2.0 * sigma**2)
            for f in self.vectors
        ]
        return density[here] - density[1 - here]


def spike_pair(dimension: int, batch_clip: float) -> OneOddPair:
    """The theorem's own worst case (Lemma 3): f of norm c' and f + g of norm c' + 1, both along
    (d−1, −1, …, −1)."""
    check_theorem(dimension, batch_clip)
    if dimension < 2:
        raise InvalidArgumentError(
            "dimension", expected="at least 2 for a spike pair", got=dimension
        )
    unit = 1.0 / math.sqrt(dimension * (dimension - 1.0))
    lengths = (batch_clip, batch_clip + 1.0)
    return OneOddPair(
        name="spike",
        dimension=dimension,
        odd=(lengths[0] * unit * (dimension - 1), lengths[1] * unit * (dimension - 1)),
        base=(-lengths[0] * unit, -lengths[1] * unit),
    )


def constant_pair(dimension: int, batch_clip: float) -> OneOddPair:
    """Equal entries, norms c' and c' + 1: allowed inputs the proof excludes."""
    check_theorem(dimension, batch_clip)
    entries = (batch_clip / math.sqrt(dimension), (batch_clip + 1.0) / math.sqrt(dimension))
    return OneOddPair(name="constant", dimension=dimension, odd=entries, base=entries)


def vector_pair(first: Sequence[float], second: Sequence[float]) -> Pair:
    """The pair of two given vectors: one odd entry at any length, any entries up to length 10.

    >>> vector_pair([3.0, 0.0, 0.0], [4.0, 0.0, 0.0]).dimension
    3
    """
    if len(first) != len(second) or not first:
        raise InvalidArgumentError(
            "vectors",
            expected="two vectors of the same length, at least 1",
            got=f"lengths {len(first)} and {len(second)}",
        )
    if not np.all(np.isfinite([*first, *second])):
        raise InvalidArgumentError("vectors", expected="finite entries", got="nan or infinity")
    shapes = [_one_odd(np.array(vector, dtype=np.float64)) for vector in (first, second)]
    if shapes[0] is not None and shapes[1] is not None:
        odd, base = zip(*shapes, strict=True)
        return OneOddPair(name="given", dimension=len(first), odd=odd, base=base)
    if len(first) > LARGEST_ARBITRARY:
        raise InvalidArgumentError(
            "vectors",
            expected=f"all entries but one equal, or at most {LARGEST_ARBITRARY} entries",
            got=f"{len(first)} entries",
            remedy="the likelihood is a permanent; shorten the vectors",
        )
    vectors = np.array(first, dtype=np.float64), np.array(second, dtype=np.float64)
    return ArbitraryPair(name="given", dimension=len(first), vectors=vectors)


def _one_odd(vector: Array) -> tuple[float, float] | None:
    """(the entry that differs, the value of all others); None if several differ.

    Where all are equal, both are that value.
    """
    values, counts = np.unique(vector, return_counts=True)
    if values.size > 2 or (values.size == 2 and counts.min() > 1):
        return None
    rarer = int(np.argmin(counts))
    return float(values[rarer]), float(values[values.size - 1 - rarer])


def _log_permanent(log_matrix: Array) -> Array:
    """log of the permanent of e^{log_matrix[n]}, all terms positive, by sums over subsets.

    permanent(rows 1..k, columns S) = Σ_{j∈S} A[k, j] · permanent(rows 1..k−1, S∖{j}).
    """
    size = log_matrix.shape[1]
    peak = log_matrix.max(axis=2)
    matrix = np.exp(log_matrix - peak[:, :, None])
    partial = np.zeros((1 << size, log_matrix.shape[0]))
    partial[0] = 1.0
    for subset in range(1, 1 << size):
        row = subset.bit_count() - 1
        for column in range(size):
            if subset >> column & 1:
                partial[subset] += matrix[:, row, column] * partial[subset ^ (1 << column)]
    with np.errstate(divide="ignore"):
        return np.log(partial[-1]) + peak.sum(axis=1)
