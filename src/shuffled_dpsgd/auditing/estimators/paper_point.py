"""The paper's own estimator (its Sec. V-F, Table 6), in both readings of its text.

ε = max{ln((1−α−δ)/β), ln((1−β−δ)/α), 0}, maximised over every threshold. For ε = 0.5 the paper
drops thresholds "where α < 4e-4 and β < 4e-4". Taken at its word (`both`), a threshold without a
single error on one side stays, and the estimate is infinite; `either` drops those, which must be
what was done where a finite figure is printed. What it lacks: a confidence interval, and a
correction for having looked at every threshold. It therefore reports a positive ε on pure noise;
`null_distribution` says how much.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from shuffled_dpsgd.auditing.estimators.clopper_pearson import epsilon_of_rates
from shuffled_dpsgd.auditing.estimators.scores import EstimatedBound, Floats, ScorePair

DROPPED_BELOW = 4e-4
Dropped = Literal["either", "both", "nothing"]
LACKS = (
    "a point estimate: no confidence interval",
    "the best of all thresholds, without correction",
)


@dataclass(frozen=True, kw_only=True)
class PaperPoint:
    """The largest point estimate over all thresholds; it bounds nothing, and may be infinite.

    `drop` says which thresholds go: those where either rate lies below `dropped_below`, where both
    do, or none.
    """

    drop: Dropped = "either"
    dropped_below: float = DROPPED_BELOW
    name: str = "paper-point"

    def lower_bound(
        self, scores: ScorePair, *, delta: float, confidence: float = 0.95
    ) -> EstimatedBound:
        """Same signature as the bounds beside it; `confidence` cannot be honoured."""
        del confidence
        thresholds = np.unique(np.concatenate([scores.out, scores.present]))
        ordered_out, ordered_in = np.sort(scores.out), np.sort(scores.present)
        alpha = 1.0 - np.searchsorted(ordered_out, thresholds, side="right") / scores.num_out
        beta = np.searchsorted(ordered_in, thresholds, side="right") / scores.num_present
        small = (alpha < self.dropped_below, beta < self.dropped_below)
        kept = ~{
            "either": small[0] | small[1],
            "both": small[0] & small[1],
            "nothing": np.zeros_like(small[0]),
        }[self.drop]
        epsilons = epsilon_of_rates(alpha[kept], beta[kept], delta)
        return EstimatedBound(
            epsilon=float(epsilons.max()) if epsilons.size else 0.0,
            delta=delta,
            method=self.name,
            confidence=None,
            may_refute="no claim",
            assumptions=LACKS,
            counts={
                "num_out": scores.num_out,
                "num_present": scores.num_present,
                "num_thresholds": int(kept.sum()),
            },
        )


def null_distribution(
    *,
    num_observations: int,
    delta: float,
    repetitions: int = 200,
    seed: int = 0,
    drop: Dropped = "either",
) -> Floats:
    """What the estimator prints when nothing leaks at all: both worlds the same normal noise."""
    rng = np.random.default_rng(seed)
    estimator = PaperPoint(drop=drop)
    printed = []
    for _ in range(repetitions):
        out, present = rng.standard_normal((2, num_observations))
        printed.append(
            estimator.lower_bound(ScorePair(out=out, present=present), delta=delta).epsilon
        )
    return np.array(printed)
