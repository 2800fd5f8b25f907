"""What an adversary computes from one released step, and what it must know to do so.

Each adversary maps a block of observations, one per row, to one score per row; a high score speaks
for the canary. They differ in what they do about the permutation: ignore it (the paper's), take
the best or the average over the orbit, use a statistic it cannot move, or undo it.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from scipy.special import logsumexp

from shuffled_dpsgd.auditing.canaries import AxisCanary
from shuffled_dpsgd.auditing.estimators.scores import Floats
from shuffled_dpsgd.errors import InvalidArgumentError


class ThreatModel(enum.Enum):
    """What the adversary sees. Each includes all that comes after it."""

    MECHANISM_OUTPUT = "noisy sums"

    STEP_GRADIENTS = "step gradients"
    ITERATES = "iterates"
    FINAL_WITH_INITIAL = "final weights, initial weights known"
    FINAL_WITHOUT_INITIAL = "final weights, initial weights unknown"
    BLACK_BOX = "black box"


class Adversary(Protocol):
    """Scores rows of observations for the presence of a canary."""

    @property
    def name(self) -> str: ...

    @property
    def threat_model(self) -> ThreatModel: ...

    def scores(self, observed: Floats, canary: AxisCanary, noise_std: float) -> Floats: ...


@dataclass(frozen=True, kw_only=True)
class FixedIndex:
    """The paper's: reads the index where the canary was planted, as if nothing had moved."""

    name: str = "fixed index"
    threat_model: ThreatModel = ThreatModel.STEP_GRADIENTS

    def scores(self, observed: Floats, canary: AxisCanary, noise_std: float) -> Floats:
        del noise_std
        return observed[:, int(np.argmax(np.abs(canary.vector)))].astype(np.float64)


@dataclass(frozen=True, kw_only=True)
class OrbitMaximum:
    """The best match over all placements of the canary.

    By the rearrangement inequality the maximum of ⟨y, P·g⟩ over permutations P is the inner product
    of the sorted vectors; for a Dirac canary that is the largest observed value.
    """

    name: str = "orbit maximum"
    threat_model: ThreatModel = ThreatModel.STEP_GRADIENTS

    def scores(self, observed: Floats, canary: AxisCanary, noise_std: float) -> Floats:
        del noise_std
        if canary.spike is not None:
            return (observed * np.sign(canary.spike)).max(axis=1).astype(np.float64)
        return np.asarray(np.sort(observed, axis=1) @ np.sort(canary.vector))


@dataclass(frozen=True, kw_only=True)
class OrbitLikelihoodRatio:
    """Exact log likelihood ratio under a uniform placement: by Neyman–Pearson the strongest test.

    Only for Dirac canaries, whose orbit has as many points as the axis; that of a general vector
    has size! points and its likelihood is a matrix permanent.
    """

    name: str = "orbit likelihood ratio"
    threat_model: ThreatModel = ThreatModel.STEP_GRADIENTS

    def scores(self, observed: Floats, canary: AxisCanary, noise_std: float) -> Floats:
        if canary.spike is None:
            raise InvalidArgumentError(
                "canary", expected="a Dirac canary, whose orbit can be enumerated", got=canary.name
            )
        exponents = observed * (canary.spike / noise_std**2)
        shift = np.log(canary.size) + canary.spike**2 / (2.0 * noise_std**2)
        return np.asarray(logsumexp(exponents, axis=1) - shift)


@dataclass(frozen=True, kw_only=True)
class AxisSum:
    """Sums over the permuted axis: no permutation of the axis changes this number."""

    name: str = "axis sum"
    threat_model: ThreatModel = ThreatModel.STEP_GRADIENTS

    def scores(self, observed: Floats, canary: AxisCanary, noise_std: float) -> Floats:
        del noise_std
        return np.asarray(observed.sum(axis=1) * np.sign(canary.vector.sum()) * canary.size**-0.5)


@dataclass(frozen=True, kw_only=True)
class MatchedFilter:
    """Inner product with the canary where it was planted: optimal once nothing is permuted."""

    name: str = "matched filter"
    threat_model: ThreatModel = ThreatModel.STEP_GRADIENTS

    def scores(self, observed: Floats, canary: AxisCanary, noise_std: float) -> Floats:
        del noise_std
        return np.asarray(observed @ canary.vector)
