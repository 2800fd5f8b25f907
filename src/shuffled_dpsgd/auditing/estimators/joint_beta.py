"""Joint Bayesian interval on the two error rates (Zanella-Béguelin et al., ICML 2023).

Where Clopper–Pearson boxes the two rates separately, this integrates their joint posterior over
the region where ε exceeds a value. It is not always the larger of the two: the direction has to be
chosen on the held-out part, since maximising over both on the same counts breaks the level.
`OrderStatistics` needs no held-out part and has a proven level.

The prior is uniform, not Jeffreys': with Beta(1, 1) the posterior's upper quantile after k errors
in n trials is that of Beta(k+1, n−k+1), which all but equals the Clopper–Pearson limit, so the
credible level also holds as a frequency; Jeffreys' does not when almost no errors are seen.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from scipy.optimize import brentq
from scipy.special import betainc, betaincinv

from shuffled_dpsgd.auditing.estimators.clopper_pearson import upper_limit
from shuffled_dpsgd.auditing.estimators.scores import (
    ErrorCounts,
    EstimatedBound,
    Floats,
    ScorePair,
    check_levels,
)
from shuffled_dpsgd.auditing.estimators.threshold import (
    Decision,
    Gain,
    HeldOut,
    best_decision,
)

Direction = Literal["present", "absent"]
NODES = 200
LARGEST_EPSILON = 60.0


def credible_epsilon(
    counts: ErrorCounts, direction: Direction, *, delta: float, confidence: float
) -> float:
    """Largest ε that the posterior still exceeds with probability `confidence`.

    "present" reads `TPR > e^ε·FPR + δ`, "absent" the same with the worlds exchanged. The error on
    the large side is integrated at equal-probability nodes, the small one in closed form.
    """
    small, small_n = counts.false_positives, counts.num_out
    large, large_n = counts.false_negatives, counts.num_present
    if direction == "absent":
        small, small_n, large, large_n = large, large_n, small, small_n
    quantiles = (np.arange(NODES) + 0.5) / NODES
    kept = 1.0 - betaincinv(large + 1.0, large_n - large + 1.0, quantiles) - delta

    def surplus(epsilon: float) -> float:
        ceiling = np.clip(kept * math.exp(-epsilon), 0.0, 1.0)
        exceeded = float(betainc(small + 1.0, small_n - small + 1.0, ceiling).mean())
        return exceeded - confidence

    if surplus(0.0) < 0.0:
        return 0.0
    return float(brentq(surplus, 0.0, LARGEST_EPSILON, xtol=1e-6))


def directed_gain(direction: Direction, delta: float, level: float) -> Gain:
    """What to maximise over thresholds for one of the two inequalities."""

    def gain(fp: Floats, num_out: int, fn: Floats, num_present: int) -> Floats:
        if direction == "absent":
            fp, num_out, fn, num_present = fn, num_present, fp, num_out
        kept = np.maximum(1.0 - fn / num_present - delta, 1e-300)
        bound: Floats = np.log(kept) - np.log(upper_limit(fp, num_out, level))
        return bound

    return gain


@dataclass(frozen=True, kw_only=True)
class JointBeta:
    """Credible lower bound from the joint posterior; its frequency is checked, not proven."""

    rule: HeldOut = field(default_factory=HeldOut)
    name: str = "joint-beta"

    def lower_bound(
        self, scores: ScorePair, *, delta: float, confidence: float = 0.95
    ) -> EstimatedBound:
        check_levels(delta=delta, confidence=confidence)
        chosen_on, counted_on = scores.split(self.rule.fraction)
        options: list[tuple[float, Direction, Decision]] = []
        directions: tuple[Direction, ...] = ("present", "absent")
        for direction in directions:
            gain = directed_gain(direction, delta, 1.0 - confidence)
            decision = best_decision(chosen_on, counted_on, gain)
            seen = decision.errors(chosen_on)
            promise = credible_epsilon(seen, direction, delta=delta, confidence=confidence)
            options.append((promise, direction, decision))
        _, direction, decision = max(options, key=lambda option: option[0])
        counts = decision.errors(counted_on)
        return EstimatedBound(
            epsilon=credible_epsilon(counts, direction, delta=delta, confidence=confidence),
            delta=delta,
            method=self.name,
            confidence=confidence,
            may_refute="no claim",
            assumptions=(
                "observations are independent",
                "credible level under a uniform prior; its frequency is checked, not proven",
            ),
            counts={**counts.to_json(), "threshold": decision.threshold},
        )
