"""Scores of two worlds, the error counts of a decision, and the bound an estimator draws from them.

An adversary turns each observation into one number. `ScorePair` holds those numbers for the world
without the canary and the world with it; every estimator starts there and ends in an
`EstimatedBound`, which says at which confidence, and under which assumptions, ε is at least what.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from shuffled_dpsgd.core.claim import PrivacyClaim
from shuffled_dpsgd.errors import InvalidArgumentError

Floats = NDArray[np.float64]
Refutable = Literal["any claim", "Gaussian claims", "no claim"]


@dataclass(frozen=True, kw_only=True)
class ScorePair:
    """Independent scores without (`out`) and with (`present`) the canary.

    >>> pair = ScorePair(out=np.zeros(3), present=np.ones(2))
    >>> pair.num_out, pair.num_present
    (3, 2)
    """

    out: Floats
    present: Floats

    def __post_init__(self) -> None:
        for name in ("out", "present"):
            values = np.asarray(getattr(self, name), dtype=np.float64)
            if values.ndim != 1 or values.size < 2 or not np.isfinite(values).all():
                raise InvalidArgumentError(
                    name, expected="at least two finite scores in one row", got=values.shape
                )
            object.__setattr__(self, name, values)

    @property
    def num_out(self) -> int:
        return int(self.out.size)

    @property
    def num_present(self) -> int:
        return int(self.present.size)

    def split(self, fraction: float) -> tuple[ScorePair, ScorePair]:
        """The leading `fraction` of each world, and the rest (scores are exchangeable)."""
        cut_out = min(max(round(fraction * self.num_out), 2), self.num_out - 2)
        cut_in = min(max(round(fraction * self.num_present), 2), self.num_present - 2)
        if min(cut_out, cut_in) < 2:
            raise InvalidArgumentError(
                "scores", expected="at least four per world to split", got=self.num_out
            )
        return (
            ScorePair(out=self.out[:cut_out], present=self.present[:cut_in]),
            ScorePair(out=self.out[cut_out:], present=self.present[cut_in:]),
        )


@dataclass(frozen=True, kw_only=True)
class ErrorCounts:
    """What one decision rule got wrong: raw counts, from which every rate follows."""

    false_positives: int
    num_out: int
    false_negatives: int
    num_present: int

    @property
    def false_positive_rate(self) -> float:
        return self.false_positives / self.num_out

    @property
    def true_positive_rate(self) -> float:
        return 1.0 - self.false_negatives / self.num_present

    def to_json(self) -> dict[str, int]:
        return {
            "false_positives": self.false_positives,
            "num_out": self.num_out,
            "false_negatives": self.false_negatives,
            "num_present": self.num_present,
        }


@dataclass(frozen=True, kw_only=True)
class EstimatedBound:
    """ε is at least `epsilon` at level `confidence`, provided the `assumptions` hold.

    `may_refute` says which claims it can overturn. A bound that holds for every mechanism: any. One
    that reads a whole Gaussian trade-off curve off one point: only claims that assert that curve.
    A point estimate or a credible level: none. `confidence` is None for a point estimate.
    """

    epsilon: float
    delta: float
    method: str
    confidence: float | None
    may_refute: Refutable
    assumptions: tuple[str, ...] = ()
    counts: Mapping[str, float | int] = field(default_factory=dict)

    def as_claim(self) -> PrivacyClaim:
        """The bound as a measured claim: what an attack showed, not what is guaranteed."""
        return PrivacyClaim(
            epsilon=self.epsilon,
            delta=self.delta,
            method=self.method,
            kind="measured",
            assumptions=self.assumptions,
            inputs={"confidence": self.confidence, **self.counts},
        )

    def to_json(self) -> dict[str, object]:
        return {
            **self.as_claim().to_json(),
            "confidence": self.confidence,
            "may_refute": self.may_refute,
        }


def check_levels(*, delta: float, confidence: float) -> None:
    """Refuse a δ or a confidence that means nothing."""
    if not 0.0 <= delta < 1.0:
        raise InvalidArgumentError("delta", expected="a number in [0, 1)", got=delta)
    if not 0.0 < confidence < 1.0:
        raise InvalidArgumentError(
            "confidence", expected="a number strictly between 0 and 1", got=confidence
        )
