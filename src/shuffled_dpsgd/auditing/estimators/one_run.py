"""Privacy auditing with one training run (Steinke, Nasr, Jagielski, NeurIPS 2023).

m canaries are each included with probability one half, independently; the adversary guesses the
inclusion of some of them and abstains on the rest. If the run is (ε, δ)-DP with respect to adding
or removing any one canary, the number W of right guesses among r satisfies (their Theorem 5.2)

    P[W ≥ v] ≤ f(v) + 2·m·δ·max_i (f(v−i) − f(v)) / i,   f(v) = P[Binomial(r, 1/(1+e^−ε)) ≥ v].

The largest ε for which the right side stays at or below the error level is refuted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import bdtrc, expit

from shuffled_dpsgd.auditing.estimators.scores import EstimatedBound, Floats, check_levels
from shuffled_dpsgd.errors import InvalidArgumentError

LARGEST_EPSILON = 60.0


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

    def guess(self, num_guesses: int) -> int:
        """Call the highest half of `num_guesses` present and the lowest half absent: right ones."""
        order = np.argsort(self.scores, kind="stable")
        lowest, highest = num_guesses // 2, num_guesses - num_guesses // 2
        right_low = int((~self.included[order[:lowest]]).sum())
        return right_low + int(self.included[order[self.num_canaries - highest :]].sum())


def p_value(
    epsilon: float, *, delta: float, num_canaries: int, num_guesses: int, num_right: int
) -> float:
    """Bound on the chance of so many right guesses if the run is (`epsilon`, `delta`)-DP.

    >>> round(p_value(0.0, delta=0.0, num_canaries=10, num_guesses=10, num_right=10), 9)
    0.000976562
    """
    if num_right == 0:
        return 1.0
    right_prob = float(expit(epsilon))
    tail = float(bdtrc(num_right - 1, num_guesses, right_prob))
    if delta == 0.0:
        return min(tail, 1.0)
    # Tails of the binomial at v−1, …, 0 minus that at v: the mass in between, summed downwards.
    tails = bdtrc(np.arange(num_right - 2, -1, -1), num_guesses, right_prob)
    below = np.append(tails, 1.0) - tail
    steepest = float((below / np.arange(1, num_right + 1)).max())
    return min(tail + 2.0 * num_canaries * delta * steepest, 1.0)


def one_run_epsilon(
    *, num_canaries: int, num_guesses: int, num_right: int, delta: float, level: float
) -> float:
    """Largest refuted ε at error level `level`; zero when chance explains the guesses."""

    def refuted(epsilon: float) -> bool:
        return (
            p_value(
                epsilon,
                delta=delta,
                num_canaries=num_canaries,
                num_guesses=num_guesses,
                num_right=num_right,
            )
            <= level
        )

    return last_refuted(refuted, largest=LARGEST_EPSILON, accuracy=1e-5)


def last_refuted(refuted: Callable[[float], bool], *, largest: float, accuracy: float) -> float:
    """The largest parameter up to `largest` that is refuted, to `accuracy` below; zero if none is.

    Whatever is below a refuted parameter must be refuted too.
    """
    if not refuted(0.0):
        return 0.0
    low, high = 0.0, largest
    while high - low > accuracy:
        middle = 0.5 * (low + high)
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low


@dataclass(frozen=True, kw_only=True)
class OneRun:
    """Lower bound from one run; shares of canaries to guess are fixed, Bonferroni over them."""

    guess_shares: tuple[float, ...] = (0.02, 0.1, 0.4, 1.0)
    name: str = "one-run"

    def lower_bound(
        self, inclusion: Inclusion, *, delta: float, confidence: float = 0.95
    ) -> EstimatedBound:
        check_levels(delta=delta, confidence=confidence)
        level = (1.0 - confidence) / len(self.guess_shares)
        best = (-1.0, 0, 0)
        for share in self.guess_shares:
            num_guesses = max(1, round(share * inclusion.num_canaries))
            num_right = inclusion.guess(num_guesses)
            epsilon = one_run_epsilon(
                num_canaries=inclusion.num_canaries,
                num_guesses=num_guesses,
                num_right=num_right,
                delta=delta,
                level=level,
            )
            best = max(best, (epsilon, num_guesses, num_right))
        return EstimatedBound(
            epsilon=best[0],
            delta=delta,
            method=self.name,
            confidence=confidence,
            may_refute="any claim",
            assumptions=("every canary is included by its own fair coin",),
            counts={
                "num_canaries": inclusion.num_canaries,
                "num_guesses": best[1],
                "num_right": best[2],
            },
        )
