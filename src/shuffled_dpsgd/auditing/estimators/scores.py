"""Scores of two worlds or of one run's canaries, and the bound an estimator draws from them.

An adversary turns each observation into one number. `ScorePair` holds those numbers for the world
without the canary and the world with it, `Inclusion` those of the canaries of one run. Every
estimator starts there and ends in an `EstimatedBound`, which says at which confidence, and under
which assumptions, ε is at least what.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from shuffled_dpsgd.core.claim import PrivacyClaim
from shuffled_dpsgd.errors import InvalidArgumentError, require

Floats = NDArray[np.float64]
Refutable = Literal["any claim", "Gaussian claims"]


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


@dataclass(frozen=True, kw_only=True)
class Inclusion:
    """One score per canary and whether the canary was in the run; higher means "more present"."""

    scores: Floats
    included: NDArray[np.bool_]

    def __post_init__(self) -> None:
        scores = np.asarray(self.scores, dtype=np.float64)
        included = np.asarray(self.included, dtype=np.bool_)
        if scores.ndim != 1 or scores.shape != included.shape or scores.size < 2:
            raise InvalidArgumentError(
                "scores",
                expected="one score and one bit per canary, at least two",
                got=scores.shape,
            )
        if not np.isfinite(scores).all():
            raise InvalidArgumentError("scores", expected="finite numbers", got="nan or inf")
        object.__setattr__(self, "scores", scores)
        object.__setattr__(self, "included", included)

    @property
    def num_canaries(self) -> int:
        return int(self.scores.size)

    def as_pair(self) -> ScorePair:
        """The canaries that were left out, and those that were not, as two worlds."""
        return ScorePair(out=self.scores[~self.included], present=self.scores[self.included])


@dataclass(frozen=True, kw_only=True)
class EstimatedBound:
    """ε is at least `epsilon` at level `confidence`, provided the `assumptions` hold.

    `may_refute` says which claims it can overturn. A bound that holds for every mechanism: any. One
    over Gaussian curves tests the parameters of a mechanism, and overturns only proven claims about
    that mechanism: the one of `counts["num_steps"]` steps sampled at `counts["sampling_prob"]`.
    """

    epsilon: float
    delta: float
    method: str
    confidence: float
    may_refute: Refutable
    assumptions: tuple[str, ...] = ()
    counts: Mapping[str, float | int] = field(default_factory=dict)

    def refutes_such(self, claim: PrivacyClaim) -> bool:
        """Whether the bound may refute a claim of this kind, whatever its ε."""
        if self.may_refute == "any claim":
            return True
        same = all(claim.inputs.get(k) == self.counts[k] for k in ("sampling_prob", "num_steps"))
        return claim.kind == "proven" and same

    def to_json(self) -> dict[str, object]:
        """The bound as a measured claim: what an attack showed, not what is guaranteed."""
        claim = PrivacyClaim(
            epsilon=self.epsilon,
            delta=self.delta,
            method=self.method,
            kind="measured",
            assumptions=self.assumptions,
            inputs={"confidence": self.confidence, **self.counts},
        )
        facts = {"confidence": self.confidence, "may_refute": self.may_refute}
        return claim.to_json() | facts


def check_levels(*, delta: float, confidence: float) -> None:
    """Refuse a δ or a confidence that means nothing."""
    if not 0.0 <= delta < 1.0:
        raise InvalidArgumentError("delta", expected="a number in [0, 1)", got=delta)
    require(0.0 < confidence < 1.0, "confidence", "a number strictly between 0 and 1", confidence)
