"""ROC points, their area with an interval, TPR at a fixed FPR, and the curve a claim allows.

These describe; they refute nothing. Points are empirical unless a function says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.optimize import brentq
from scipy.special import ndtri

from shuffled_dpsgd.auditing.estimators.clopper_pearson import survival, upper_limit
from shuffled_dpsgd.auditing.estimators.scores import Floats, ScorePair

BESIDE = 1e-9


@dataclass(frozen=True, kw_only=True)
class Roc:
    """False- and true-positive rates as the threshold falls, from (0, 0) to (1, 1)."""

    false_positive_rate: Floats
    true_positive_rate: Floats

    @property
    def area(self) -> float:
        """Area under the curve: one half is guessing."""
        return float(np.trapezoid(self.true_positive_rate, self.false_positive_rate))


def roc(scores: ScorePair) -> Roc:
    """The empirical curve of the rule "present when the score is high"."""
    thresholds = np.unique(np.concatenate([scores.out, scores.present]))[::-1]
    return Roc(
        false_positive_rate=np.concatenate([[0.0], survival(scores.out, thresholds), [1.0]]),
        true_positive_rate=np.concatenate([[0.0], survival(scores.present, thresholds), [1.0]]),
    )


@dataclass(frozen=True, kw_only=True)
class Area:
    """Area under the ROC curve of an attack, with an interval: one half is guessing."""

    area: float
    low: float
    high: float
    confidence: float

    def __str__(self) -> str:
        return f"{self.area:.3f} ({100 * self.confidence:g} %: {self.low:.3f} to {self.high:.3f})"


def area_of(scores: ScorePair, *, confidence: float = 0.95) -> Area:
    """The area and its score interval (Newcombe 2006, method 5).

    The ends are the areas θ from which the observed one is as far as the quantile times the
    standard error at θ, by Hanley and McNeil. So the interval has a width where the classes are
    separated completely. It takes the scores to be independent; those of one model are nearly so.
    """
    found, quantile = roc(scores).area, float(ndtri(0.5 + confidence / 2.0))
    size = (scores.num_out + scores.num_present) / 2.0 - 1.0

    def excess(theta: float) -> float:
        spread = 1.0 + size * ((1.0 - theta) / (2.0 - theta) + theta / (1.0 + theta))
        variance = theta * (1.0 - theta) * spread / (scores.num_out * scores.num_present)
        return (theta - found) ** 2 - quantile**2 * variance

    # Just beside the area itself: at the ends 0 and 1 it is a root as well, and not the one meant.
    low = 0.0 if found == 0.0 else brentq(excess, 0.0, found * (1.0 - BESIDE))
    high = 1.0 if found == 1.0 else brentq(excess, found + (1.0 - found) * BESIDE, 1.0)
    return Area(area=found, low=float(low), high=float(high), confidence=confidence)


@dataclass(frozen=True, kw_only=True)
class RateAt:
    """True-positive rate at a false-positive rate not above the one asked for."""

    false_positive_rate: float
    true_positive_rate: float
    lower_limit: float


def tpr_at_fpr(scores: ScorePair, max_fpr: float, *, confidence: float = 0.95) -> RateAt:
    """TPR at the lowest threshold whose empirical FPR is at most `max_fpr`.

    `lower_limit` is the Clopper–Pearson lower limit of the TPR at that threshold.
    """
    curve = roc(scores)
    allowed = np.flatnonzero(curve.false_positive_rate <= max_fpr)
    at = int(allowed[np.argmax(curve.true_positive_rate[allowed])])
    tpr = float(curve.true_positive_rate[at])
    missed = round((1.0 - tpr) * scores.num_present)
    return RateAt(
        false_positive_rate=float(curve.false_positive_rate[at]),
        true_positive_rate=tpr,
        lower_limit=1.0 - float(upper_limit(missed, scores.num_present, 1.0 - confidence)),
    )


def claim_trade_off(fp_rate: Floats, *, epsilon: float, delta: float) -> Floats:
    """Least type II error that (ε, δ)-DP allows at each type I error (Wasserman and Zhou 2010)."""
    first = 1.0 - delta - np.exp(epsilon) * fp_rate
    second = np.exp(-epsilon) * (1.0 - delta - fp_rate)
    return np.maximum(np.maximum(first, second), 0.0)
