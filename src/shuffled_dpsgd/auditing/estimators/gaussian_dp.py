"""Gaussian-DP audit (Nasr et al. 2023): one decision fixes μ, and μ fixes the whole curve.

A Gaussian trade-off curve has one parameter, so a decision with measurable errors on both sides
extrapolates to an ε far beyond what the same number of observations certifies without the
assumption. That is its strength and its limit: for any other curve the figure means nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from scipy.special import ndtri

from shuffled_dpsgd.accounting import certified_bracket
from shuffled_dpsgd.accounting.theorem import smallest_epsilon
from shuffled_dpsgd.auditing.estimators.clopper_pearson import upper_limit
from shuffled_dpsgd.auditing.estimators.scores import (
    EstimatedBound,
    Floats,
    ScorePair,
    check_levels,
)
from shuffled_dpsgd.auditing.estimators.threshold import HeldOut, ThresholdRule


def gaussian_epsilon(mu: float, delta: float) -> float:
    """ε(δ) of a μ-GDP mechanism, the exact Gaussian mechanism; infinite at δ = 0 unless μ = 0.

    >>> round(gaussian_epsilon(1.0, 1e-5), 3)
    4.377
    """
    if mu <= 0.0:
        return 0.0
    if delta == 0.0:
        return math.inf
    return smallest_epsilon(1.0 / mu, delta, dimension=1, batch_clip=1.0)


def composed_epsilon(mu: float, *, sampling_prob: float, num_steps: int, delta: float) -> float:
    """ε of `num_steps` Poisson-sampled steps that are each μ-GDP when the canary takes part.

    The optimistic end of the accountant's bracket: never above the exact value, so a lower bound
    on μ becomes a lower bound on ε, for mechanisms that are Gaussian in every step.
    """
    if mu <= 0.0:
        return 0.0
    return certified_bracket(
        noise_multiplier=1.0 / mu, sampling_prob=sampling_prob, num_steps=num_steps, delta=delta
    ).lower


def mu_of_rates(fp_rate: Floats, fn_rate: Floats) -> Floats:
    """μ of the Gaussian curve through this pair of error rates, never below zero."""
    mu: Floats = ndtri(1.0 - fp_rate) - ndtri(fn_rate)
    return np.fmax(np.where(np.isfinite(mu), mu, 0.0), 0.0)


@dataclass(frozen=True, kw_only=True)
class GaussianDP:
    """Lower bound on μ at the stated level, and the ε it implies on the Gaussian curve."""

    rule: ThresholdRule = field(default_factory=HeldOut)
    name: str = "gaussian-dp"

    def lower_bound(
        self, scores: ScorePair, *, delta: float, confidence: float = 0.95
    ) -> EstimatedBound:
        check_levels(delta=delta, confidence=confidence)
        level = 1.0 - confidence

        def mu_of_counts(
            fp: Floats | int, num_out: int, fn: Floats | int, num_present: int, each: float
        ) -> Floats:
            return mu_of_rates(upper_limit(fp, num_out, each), upper_limit(fn, num_present, each))

        def gain(fp: Floats, num_out: int, fn: Floats, num_present: int) -> Floats:
            return mu_of_counts(fp, num_out, fn, num_present, level / 2.0)

        trial = self.rule.plan(scores, gain)
        each = level / 2.0 / len(trial.decisions)
        mus: list[tuple[float, dict[str, int]]] = []
        for decision in trial.decisions:
            errors = decision.errors(trial.scores)
            mu = mu_of_counts(
                errors.false_positives,
                errors.num_out,
                errors.false_negatives,
                errors.num_present,
                each,
            )
            mus.append((float(mu), errors.to_json()))
        best, counts = max(mus, key=lambda found: found[0])
        return EstimatedBound(
            epsilon=gaussian_epsilon(best, delta),
            delta=delta,
            method=self.name,
            confidence=confidence,
            may_refute="Gaussian claims",
            assumptions=("observations are independent", "the trade-off curve is Gaussian"),
            counts={**counts, "mu": best},
        )
