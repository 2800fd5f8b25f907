"""ROC points, TPR at a fixed FPR, and the trade-off curves a claim allows.

These describe; they do not bound. Points are empirical unless a function says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.special import ndtr, ndtri

from shuffled_dpsgd.auditing.estimators.clopper_pearson import upper_limit
from shuffled_dpsgd.auditing.estimators.scores import Floats, ScorePair
from shuffled_dpsgd.auditing.estimators.threshold import survival


@dataclass(frozen=True, kw_only=True)
class Roc:
    """False- and true-positive rates as the threshold falls, from (0, 0) to (1, 1)."""

    false_positive_rate: Floats
    true_positive_rate: Floats

    @property
    def area(self) -> float:
        """Area under the curve: one half is guessing."""
        return float(np.trapezoid(self.true_positive_rate, self.false_positive_rate))

    def trade_off(self) -> tuple[Floats, Floats]:
        """Type I and type II error: the empirical trade-off curve."""
        return self.false_positive_rate, 1.0 - self.true_positive_rate


def roc(scores: ScorePair) -> Roc:
    """The empirical curve of the rule "present when the score is high"."""
    thresholds = np.unique(np.concatenate([scores.out, scores.present]))[::-1]
    return Roc(
        false_positive_rate=np.concatenate([[0.0], survival(scores.out, thresholds), [1.0]]),
        true_positive_rate=np.concatenate([[0.0], survival(scores.present, thresholds), [1.0]]),
    )


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


def gaussian_trade_off(fp_rate: Floats, *, mu: float) -> Floats:
    """Least type II error that μ-GDP allows at each type I error."""
    curve: Floats = ndtr(ndtri(1.0 - fp_rate) - mu)
    return curve
