"""Pairs of neighbouring outputs whose shuffled-Gaussian likelihood can be evaluated exactly.

The mechanism adds N(0, σ²) to a vector and shuffles all d coordinates uniformly, the ideal the
paper's theorem assumes. Its density is a mean over the distinct arrangements of the vector:
d of them when one entry is odd (the theorem's own worst case), one when all are equal, d! at worst.
Each pair draws privacy losses log p(y)/p'(y) with y from either world.

Legend: f, f' the two vectors; a world is "first" (f) or "second" (f').
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from shuffled_dpsgd.accounting.order_statistics import draw_sums
from shuffled_dpsgd.accounting.theorem import check_theorem
from shuffled_dpsgd.errors import InvalidArgumentError

Array: TypeAlias = npt.NDArray[np.float64]
World: TypeAlias = Literal["first", "second"]

LARGEST_ARBITRARY = 10
CHUNK = 2000


class Pair(Protocol):
    """Two vectors, known up to their order, that a shuffled Gaussian may not tell apart."""

    @property
    def name(self) -> str: ...

    @property
    def dimension(self) -> int: ...

    @property
    def constant_distance(self) -> float | None:
        """‖f − f'‖ if shuffling changes neither vector, so that the plain Gaussian is exact."""
        ...

    def draw_losses(
        self, world: World, noise_multiplier: float, draws: int, rng: np.random.Generator
    ) -> Array:
        """log of the density of `world` over the other's, at draws from `world`."""
        ...


@dataclass(frozen=True, kw_only=True)
class OneOddPair:
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

    def draw_losses(
        self, world: World, noise_multiplier: float, draws: int, rng: np.random.Generator
    ) -> Array:
        here = 0 if world == "first" else 1
        rounds = [
            self._draw_chunk(here, noise_multiplier, min(CHUNK, draws - start), rng)
            for start in range(0, draws, CHUNK)
        ]
        return np.concatenate(rounds)

    def _draw_chunk(self, here: int, sigma: float, draws: int, rng: np.random.Generator) -> Array:
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
class ArbitraryPair:
    """Any two short vectors, by the permanent of the matrix e^{y_i f_j/σ²} (d up to 10)."""

    name: str
    first: tuple[float, ...]
    second: tuple[float, ...]

    @property
    def dimension(self) -> int:
        return len(self.first)

    @property
    def constant_distance(self) -> float | None:
        return None

    def draw_losses(
        self, world: World, noise_multiplier: float, draws: int, rng: np.random.Generator
    ) -> Array:
        here, there = np.array(self.first), np.array(self.second)
        if world == "second":
            here, there = there, here
        losses = []
        for start in range(0, draws, CHUNK):
            size = (min(CHUNK, draws - start), here.size)
            y = here + noise_multiplier * rng.standard_normal(size)
            density = [
                _log_permanent(y[:, :, None] * f / noise_multiplier**2)
                - float(f @ f) / (2.0 * noise_multiplier**2)
                for f in (here, there)
            ]
            losses.append(density[0] - density[1])
        return np.concatenate(losses)


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
    """The pair of two given vectors: exact for one odd entry at any length, else up to length 10.

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
    here, there = _one_odd(first), _one_odd(second)
    if here is not None and there is not None:
        return OneOddPair(
            name="given",
            dimension=len(first),
            odd=(here[0], there[0]),
            base=(here[1], there[1]),
        )
    if len(first) <= LARGEST_ARBITRARY:
        return ArbitraryPair(
            name="given", first=tuple(map(float, first)), second=tuple(map(float, second))
        )
    raise InvalidArgumentError(
        "vectors",
        expected=f"at most one odd entry each, or at most {LARGEST_ARBITRARY} entries",
        got=f"{len(first)} entries with several values",
        remedy="the likelihood is a permanent; shorten the vectors or make all but one entry equal",
    )


def _one_odd(vector: Sequence[float]) -> tuple[float, float] | None:
    """(odd, base) if all entries but one are equal; two entries count as one odd and one base."""
    values, counts = np.unique(np.asarray(vector, dtype=np.float64), return_counts=True)
    if values.size == 1:
        return float(values[0]), float(values[0])
    if values.size == 2 and counts.min() == 1:
        odd = int(np.argmin(counts))
        return float(values[odd]), float(values[1 - odd])
    return None


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
