"""Clopper–Pearson audit: exact binomial limits on both errors of one decision.

(ε, δ)-DP forces `TPR ≤ e^ε·FPR + δ` and `TNR ≤ e^ε·FNR + δ` for every decision (Kairouz et al.
2015). Bounding FPR and FNR from above at half the error level each gives both inequalities at
once, for any mechanism: no assumption but independent observations.

Looking at all thresholds and keeping the best one would cost the stated confidence. So threshold
and tail are chosen on the first half of the scores, and errors are counted on the second.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.special import betaincinv

from shuffled_dpsgd.auditing.estimators.scores import (
    EstimatedBound,
    Floats,
    ScorePair,
    check_levels,
)
from shuffled_dpsgd.errors import require

EXTREMES = 48
EVENLY_SPACED = 160


def upper_limit(wrong: Floats | int, trials: int, level: float) -> Floats:
    """One-sided Clopper–Pearson upper limit: exceeds the true rate but for probability `level`.

    >>> round(float(upper_limit(0, 2500, 0.025)), 6)
    0.001474
    """
    count = np.asarray(wrong, dtype=np.float64)
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


def errors(scores: ScorePair, threshold: float, side: float = 1.0) -> tuple[int, int]:
    """False positives and false negatives of "present" beyond the threshold, on this side (±1)."""
    false_positives = int((side * scores.out > side * threshold).sum())
    false_negatives = int((side * scores.present <= side * threshold).sum())
    return false_positives, false_negatives


@dataclass(frozen=True, kw_only=True)
class ClopperPearson:
    """Lower bound valid for every mechanism, capped by the number of observations.

    With n observations counted per world no bound can exceed about `ln(n / 3.7)` at 95 %.
    """

    name: str = "clopper-pearson"
    reads: type = ScorePair

    def lower_bound(
        self, scores: ScorePair, *, delta: float, confidence: float = 0.95
    ) -> EstimatedBound:
        check_levels(delta=delta, confidence=confidence)
        level = 1.0 - confidence
        first, second = halves(scores)
        threshold, side = best_threshold(first, second, delta=delta, level=level)
        fp, fn = errors(second, threshold, side)
        bound = epsilon_of_counts(fp, second.num_out, fn, second.num_present, delta, level)
        return EstimatedBound(
            epsilon=float(bound),
            delta=delta,
            method=self.name,
            confidence=confidence,
            may_refute="any claim",
            assumptions=("observations are independent",),
            counts={
                "false_positives": fp,
                "num_out": second.num_out,
                "false_negatives": fn,
                "num_present": second.num_present,
                "threshold": threshold,
            },
        )


def halves(scores: ScorePair) -> tuple[ScorePair, ScorePair]:
    """The leading half of each world, and the rest (scores are exchangeable)."""
    expected = "at least four per world to split"
    require(min(scores.num_out, scores.num_present) >= 4, "scores", expected, scores.num_out)
    cut_out, cut_in = round(0.5 * scores.num_out), round(0.5 * scores.num_present)
    return (
        ScorePair(out=scores.out[:cut_out], present=scores.present[:cut_in]),
        ScorePair(out=scores.out[cut_out:], present=scores.present[cut_in:]),
    )


def best_threshold(
    chosen_on: ScorePair, counted_on: ScorePair, *, delta: float, level: float
) -> tuple[float, float]:
    """The threshold and side with the largest bound if rates carried over exactly."""
    thresholds = candidates(chosen_on)
    above_out, above_in = (survival(s, thresholds) for s in (chosen_on.out, chosen_on.present))
    best = (-1.0, 0.0, 1.0)
    for side, fp, fn in ((1.0, above_out, 1.0 - above_in), (-1.0, 1.0 - above_out, above_in)):
        num_out, num_present = counted_on.num_out, counted_on.num_present
        counts = np.round(fp * num_out), num_out, np.round(fn * num_present), num_present
        bounds = epsilon_of_counts(*counts, delta, level)
        at = int(np.argmax(bounds))
        if bounds[at] > best[0]:
            best = (float(bounds[at]), float(thresholds[at]), side)
    return best[1:]


def survival(values: Floats, thresholds: Floats) -> Floats:
    """Share of `values` strictly above each threshold."""
    ordered = np.sort(values)
    above: Floats = 1.0 - np.searchsorted(ordered, thresholds, side="right") / ordered.size
    return above


def candidates(scores: ScorePair) -> Floats:
    """Mid-points between pooled scores: every extreme one, and an even selection in between."""
    pooled = np.unique(np.concatenate([scores.out, scores.present]))
    if pooled.size == 1:
        return pooled
    middles: Floats = pooled[:-1] + 0.5 * np.diff(pooled)
    if middles.size <= 2 * EXTREMES + EVENLY_SPACED:
        return middles
    inner = np.linspace(EXTREMES, middles.size - EXTREMES - 1, EVENLY_SPACED).astype(int)
    keep = np.concatenate([np.arange(EXTREMES), inner, np.arange(-EXTREMES, 0) + middles.size])
    return np.asarray(middles[np.unique(keep)], dtype=np.float64)
