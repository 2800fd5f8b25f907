"""Clopper–Pearson audit: exact binomial limits on both errors of one decision.

(ε, δ)-DP forces `TPR ≤ e^ε·FPR + δ` and `TNR ≤ e^ε·FNR + δ` for every decision (Kairouz et al.
2015). Bounding FPR and FNR from above at half the error level each gives both inequalities at
once, for any mechanism: no assumption but independent observations.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from scipy.special import betaincinv

from shuffled_dpsgd.auditing.estimators.scores import (
    EstimatedBound,
    Floats,
    ScorePair,
    check_levels,
)
from shuffled_dpsgd.auditing.estimators.threshold import HeldOut, ThresholdRule


def upper_limit(errors: Floats | int, trials: int, level: float) -> Floats:
    """One-sided Clopper–Pearson upper limit: exceeds the true rate but for probability `level`.

    >>> round(float(upper_limit(0, 2500, 0.025)), 6)
    0.001474
    """
    count = np.asarray(errors, dtype=np.float64)
    inside = np.minimum(count, trials - 1)
    limit = betaincinv(inside + 1.0, trials - inside, 1.0 - level)
    return np.where(count >= trials, 1.0, limit)


def epsilon_of_rates(fp_rate: Floats, fn_rate: Floats, delta: float) -> Floats:
    """The smallest ε that allows these two error rates at this δ, never below zero."""
    with np.errstate(divide="ignore", invalid="ignore"):
        present = np.log(np.maximum(1.0 - fn_rate - delta, 0.0)) - np.log(fp_rate)
        absent = np.log(np.maximum(1.0 - fp_rate - delta, 0.0)) - np.log(fn_rate)
    best: Floats = np.fmax(np.fmax(present, absent), 0.0)
    return best


def epsilon_of_counts(
    fp: Floats | int, num_out: int, fn: Floats | int, num_present: int, delta: float, level: float
) -> Floats:
    """ε at error level `level`, split evenly between the two rates."""
    return epsilon_of_rates(
        upper_limit(fp, num_out, level / 2.0), upper_limit(fn, num_present, level / 2.0), delta
    )


@dataclass(frozen=True, kw_only=True)
class ClopperPearson:
    """Lower bound valid for every mechanism, capped by the number of observations.

    With n observations counted per world no bound can exceed about `ln(n / 3.7)` at 95 %.
    """

    rule: ThresholdRule = field(default_factory=HeldOut)
    name: str = "clopper-pearson"

    def lower_bound(
        self, scores: ScorePair, *, delta: float, confidence: float = 0.95
    ) -> EstimatedBound:
        check_levels(delta=delta, confidence=confidence)
        level = 1.0 - confidence

        def gain(fp: Floats, num_out: int, fn: Floats, num_present: int) -> Floats:
            return epsilon_of_counts(fp, num_out, fn, num_present, delta, level)

        trial = self.rule.plan(scores, gain)
        counted = [(decision, decision.errors(trial.scores)) for decision in trial.decisions]
        bounds = [
            float(
                epsilon_of_counts(
                    errors.false_positives,
                    errors.num_out,
                    errors.false_negatives,
                    errors.num_present,
                    delta,
                    level / len(trial.decisions),
                )
            )
            for _, errors in counted
        ]
        at = int(np.argmax(bounds))
        decision, errors = counted[at]
        return EstimatedBound(
            epsilon=bounds[at],
            delta=delta,
            method=self.name,
            confidence=confidence,
            may_refute="any claim",
            assumptions=("observations are independent",),
            counts={**errors.to_json(), "threshold": decision.threshold},
        )
