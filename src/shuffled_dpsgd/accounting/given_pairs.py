"""Pairs of vectors a user gives, by the cheapest exact likelihood there is for them.

The density of a shuffled Gaussian at y is a permanent in general. It collapses to a sum when one
entry is odd (`OneOddPair`), to a symmetric polynomial when there are two values, and stays a
permanent, feasible up to ten entries, otherwise.

Legend: f, f' the two vectors; m how often the rarer value occurs.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shuffled_dpsgd.accounting.pairs import Array, OneOddPair, Pair
from shuffled_dpsgd.errors import InvalidArgumentError

LARGEST_ARBITRARY = 10
LARGEST_TWO_VALUED = 20_000


class DensityPair(Pair):
    """A pair whose densities are computed at every draw."""

    def losses(self, here: int, sigma: float, draws: int, rng: np.random.Generator) -> Array:
        y = self.vector(here) + sigma * rng.standard_normal((draws, self.dimension))
        return self.log_density(here, y, sigma) - self.log_density(1 - here, y, sigma)

    @abstractmethod
    def vector(self, index: int) -> Array: ...

    @abstractmethod
    def log_density(self, index: int, y: Array, sigma: float) -> Array:
        """Up to a term that both vectors share."""


@dataclass(frozen=True, kw_only=True)
class ArbitraryPair(DensityPair):
    """Any two short vectors, by the permanent of the matrix e^{y_i f_j/σ²} (d up to 10)."""

    name: str
    dimension: int
    vectors: tuple[Array, Array]

    def vector(self, index: int) -> Array:
        return self.vectors[index]

    def log_density(self, index: int, y: Array, sigma: float) -> Array:
        f = self.vectors[index]
        return _log_permanent(y[:, :, None] * f / sigma**2) - float(f @ f) / (2.0 * sigma**2)


@dataclass(frozen=True, kw_only=True)
class TwoValuedPair(DensityPair):
    """Vectors of two values each, such as half a head's entries up and half down.

    With m entries `odd` and the rest `base`, the mean over arrangements is the elementary symmetric
    polynomial of degree m in e^{(odd−base)·y_i/σ²}, over the number of arrangements.
    """

    name: str
    dimension: int
    odd: tuple[float, float]
    base: tuple[float, float]
    odd_count: tuple[int, int]

    def vector(self, index: int) -> Array:
        mean = np.full(self.dimension, self.base[index])
        mean[: self.odd_count[index]] = self.odd[index]
        return mean

    def log_density(self, index: int, y: Array, sigma: float) -> Array:
        odd, base, count = self.odd[index], self.base[index], self.odd_count[index]
        norm = count * odd**2 + (self.dimension - count) * base**2
        arrangements = (
            math.lgamma(self.dimension + 1)
            - math.lgamma(count + 1)
            - math.lgamma(self.dimension - count + 1)
        )
        symmetric = _log_symmetric((odd - base) * y / sigma**2, count)
        return (base * y.sum(axis=1) - norm / 2.0) / sigma**2 + symmetric - arrangements


def vector_pair(first: Sequence[float], second: Sequence[float]) -> Pair:
    """The pair of two given vectors, by the cheapest exact likelihood there is for them.

    One odd entry at any length; any entries up to length 10; two values each at moderate length.

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
    shapes = [shape for shape in map(_two_values, (first, second)) if shape is not None]
    most = max((shape[2] for shape in shapes), default=0)
    facts: Any = {"name": "given", "dimension": len(first)}
    if len(shapes) == 2:
        values: Any = {name: (shapes[0][i], shapes[1][i]) for i, name in enumerate(("odd", "base"))}
        if most <= 1:
            return OneOddPair(**facts, **values)
    if len(first) <= LARGEST_ARBITRARY:
        return ArbitraryPair(**facts, vectors=(np.array(first, float), np.array(second, float)))
    if len(shapes) == 2 and most * len(first) <= LARGEST_TWO_VALUED:
        return TwoValuedPair(**facts, **values, odd_count=(shapes[0][2], shapes[1][2]))
    raise InvalidArgumentError(
        "vectors",
        expected=f"all entries but one equal; or two values each, the rarer one's count times "
        f"the length at most {LARGEST_TWO_VALUED}; or at most {LARGEST_ARBITRARY} entries",
        got=f"{len(first)} entries with several values",
        remedy="the likelihood is a permanent; shorten the vectors or give them fewer values",
    )


def _two_values(vector: Sequence[float]) -> tuple[float, float, int] | None:
    """(rarer value, other value, count of the rarer); a constant vector has none of the rarer."""
    values, counts = np.unique(np.asarray(vector, dtype=np.float64), return_counts=True)
    if values.size == 1:
        return float(values[0]), float(values[0]), 0
    if values.size == 2:
        rarer = int(np.argmin(counts))
        return float(values[rarer]), float(values[1 - rarer]), int(counts[rarer])
    return None


def _log_symmetric(log_terms: Array, degree: int) -> Array:
    """log of the elementary symmetric polynomial of `degree` in e^{log_terms[n]}, term by term."""
    table = np.full((log_terms.shape[0], degree + 1), -np.inf)
    table[:, 0] = 0.0
    for column in log_terms.T:
        table[:, 1:] = np.logaddexp(table[:, 1:], table[:, :-1] + column[:, None])
    return table[:, degree]


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
