"""One permuted axis: unit vectors an adversary would plant on it, and what reads them back.

Scaled by `clip_norm`, each canary is a contribution that per-sample clipping lets through whole.
How well it survives the shuffle depends on its shape alone, so these are plain vectors; the tensors
of a real model are filled from such shapes in `model_attacks`.

A reading maps observations, one per row, to one score per row; a high score speaks for the canary.
Readings differ in what they do about the permutation: ignore it (the paper's), take the best or the
average over the orbit, use a statistic it cannot move, or undo it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from scipy.special import logsumexp

from shuffled_dpsgd.auditing.estimators.scores import Floats
from shuffled_dpsgd.errors import require


@dataclass(frozen=True)
class AxisCanary:
    """A unit vector along an axis that is permuted as a whole."""

    name: str
    vector: Floats

    @property
    def size(self) -> int:
        return int(self.vector.size)

    @property
    def is_dirac(self) -> bool:
        return bool(self.vector[0] == 1.0)

    @property
    def is_constant(self) -> bool:
        """Whether no permutation of the axis moves it."""
        return bool(np.ptp(self.vector) == 0.0)


def dirac(size: int) -> AxisCanary:
    """One at the first index (Nasr et al. 2023; the paper's canary): an orbit of `size` points."""
    return AxisCanary("dirac", np.eye(1, size)[0])


def random_direction(size: int, rng: np.random.Generator) -> AxisCanary:
    """Uniform on the sphere: nearly every entry differs, so its orbit is the whole group."""
    drawn = rng.standard_normal(size)
    return AxisCanary("random-direction", drawn / np.linalg.norm(drawn))


def constant(size: int) -> AxisCanary:
    """The same value everywhere: a permutation of the axis does not move it at all."""
    return AxisCanary("constant-on-axis", np.full(size, size**-0.5))


def place(canary: AxisCanary, rows: int, rng: np.random.Generator, permuted: bool) -> Floats:
    """The canary in `rows` releases, under an independent uniform permutation in each."""
    if not permuted or canary.is_constant:
        return np.broadcast_to(canary.vector, (rows, canary.size))
    if canary.is_dirac:
        return np.eye(canary.size)[rng.integers(canary.size, size=rows)]
    return rng.permuted(np.tile(canary.vector, (rows, 1)), axis=1)


Reading = Callable[[Floats, AxisCanary, float], Floats]
"""Observations, the canary and the noise's standard deviation -> scores."""


def at_fixed_index(observed: Floats, canary: AxisCanary, noise_std: float) -> Floats:
    """The paper's: the index where the canary was planted, as if nothing had moved."""
    return observed[:, int(np.argmax(np.abs(canary.vector)))]


def orbit_maximum(observed: Floats, canary: AxisCanary, noise_std: float) -> Floats:
    """The best match over all placements of the canary.

    By the rearrangement inequality the maximum of ⟨y, P·g⟩ over permutations P is the inner product
    of the sorted vectors; for a Dirac canary that is the largest observed value.
    """
    if canary.is_dirac:
        return np.asarray(observed.max(axis=1))
    return np.asarray(np.sort(observed, axis=1) @ np.sort(canary.vector))


def orbit_likelihood_ratio(observed: Floats, canary: AxisCanary, noise_std: float) -> Floats:
    """Exact log likelihood ratio under a uniform placement: by Neyman–Pearson the strongest test.

    Only for Dirac canaries, whose orbit has as many points as the axis; that of a general vector
    has size! points and its likelihood is a matrix permanent.
    """
    require(canary.is_dirac, "canary", "a Dirac canary, whose orbit can be enumerated", canary.name)
    shift = np.log(canary.size) + 0.5 / noise_std**2
    return np.asarray(logsumexp(observed / noise_std**2, axis=1) - shift)


def axis_sum(observed: Floats, canary: AxisCanary, noise_std: float) -> Floats:
    """Sums over the permuted axis: no permutation of the axis changes this number."""
    return np.asarray(observed.sum(axis=1) * canary.size**-0.5)


def matched_filter(observed: Floats, canary: AxisCanary, noise_std: float) -> Floats:
    """Inner product with the canary where it was planted: optimal once nothing is permuted."""
    return np.asarray(observed @ canary.vector)


def match_rows(known: Floats, released: Floats) -> NDArray[np.intp]:
    """For each known row the released row that holds it; leading axes of `released` are a batch.

    The assignment of least summed squared distance, as in Git Re-Basin's weight matching. Where
    every row's nearest partner is a different one, that is it already, and no solver is called.
    """
    norms = np.einsum("...jd,...jd->...j", released, released)
    costs = 0.5 * norms[..., None, :] - known @ np.swapaxes(released, -1, -2)
    found = np.argmin(costs, axis=-1).reshape(-1, costs.shape[-1])
    distinct = (np.sort(found, axis=1) == np.arange(costs.shape[-1])).all(axis=1)
    each = costs.reshape(-1, *costs.shape[-2:])
    for index in np.flatnonzero(~distinct):
        found[index] = linear_sum_assignment(each[index])[1]
    return found.reshape(costs.shape[:-1])
