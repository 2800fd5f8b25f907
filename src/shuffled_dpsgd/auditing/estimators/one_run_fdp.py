"""One-run audit against a whole trade-off curve (Mahloujifar, Melis, Chaudhuri, 2024).

Legend: m canaries included by fair coins, g guesses of which W are right, f̄(x) = 1 − f(x) the
largest power at size x that the trade-off function f allows. Flipping the bit of canary j turns
"j guessed right and W = i" into "j guessed wrong and W = i − 1" on the same output. Applying f-DP
to the event W ∈ {i+1, …, g} for each j and averaging (f̄ is concave) gives, with p_i = P[W = i],

    R_{i+1} ≤ f̄(H_i),   R_i = Σ_{j≥i} (j/m)·p_j,   H_i = Σ_{j≥i} ((g−j)/m)·p_j.

Suppose P[W ≥ v] = τ. The smallest total mass is reached when all of the tail sits at v; the
recursion then adds, level by level, the least mass the inequalities demand. If that needs more
than Σ p_j = 1, then P[W ≥ v] < τ, and having seen W ≥ v refutes f at error level τ.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from scipy.special import ndtr, ndtri

from shuffled_dpsgd.auditing.estimators.gaussian_dp import gaussian_epsilon
from shuffled_dpsgd.auditing.estimators.one_run import Inclusion, last_refuted
from shuffled_dpsgd.auditing.estimators.scores import EstimatedBound, check_levels

Family = Literal["any", "gaussian"]
LeastSize = Callable[[float], float]
"""f̄⁻¹: the least size (false-positive mass) that allows a given power."""


def least_size_gaussian(mu: float) -> LeastSize:
    """f̄⁻¹ of the Gaussian trade-off G_μ: f̄(x) = Φ(Φ⁻¹(x) + μ)."""

    def least_size(power: float) -> float:
        return float(ndtr(ndtri(power) - mu)) if 0.0 < power < 1.0 else float(power >= 1.0)

    return least_size


def least_size_approximate(epsilon: float, delta: float) -> LeastSize:
    """f̄⁻¹ of (ε, δ)-DP: the larger of its two linear pieces."""

    def least_size(power: float) -> float:
        first = (power - delta) * math.exp(-epsilon)
        second = 1.0 - delta - (1.0 - power) * math.exp(epsilon)
        return max(first, second, 0.0)

    return least_size


def refutes(
    least_size: LeastSize, *, num_canaries: int, num_guesses: int, num_right: int, level: float
) -> bool:
    """Whether `num_right` right guesses are too many, at error level `level`, for the curve."""
    m, g, v = num_canaries, num_guesses, num_right
    right, wrong = level * v / m, level * (g - v) / m
    for i in range(v - 1, -1, -1):
        needed = least_size(right)
        if needed <= wrong:
            return False  # nothing more is demanded here, so nothing further down either
        right += (needed - wrong) * i / (g - i)
        wrong = needed
        if right + wrong > g / m:
            return True
    return False


def largest_refuted(
    family: Callable[[float], LeastSize],
    *,
    num_canaries: int,
    num_guesses: int,
    num_right: int,
    level: float,
    largest: float,
) -> float:
    """Largest parameter of a growing family of curves that the guesses refute."""

    def refuted(parameter: float) -> bool:
        return refutes(
            family(parameter),
            num_canaries=num_canaries,
            num_guesses=num_guesses,
            num_right=num_right,
            level=level,
        )

    return last_refuted(refuted, largest=largest, accuracy=1e-4)


@dataclass(frozen=True, kw_only=True)
class OneRunFDP:
    """Lower bound from one run, over (ε, δ) curves (`any`) or Gaussian ones (`gaussian`).

    The Gaussian family bounds ε only of mechanisms whose trade-off curve is Gaussian.
    """

    family: Family = "any"
    guess_shares: tuple[float, ...] = (0.02, 0.1, 0.4, 1.0)

    @property
    def name(self) -> str:
        return "one-run-fdp" if self.family == "any" else "one-run-fdp-gaussian"

    def lower_bound(
        self, inclusion: Inclusion, *, delta: float, confidence: float = 0.95
    ) -> EstimatedBound:
        check_levels(delta=delta, confidence=confidence)
        best = (-1.0, 0, 0)
        for share in self.guess_shares:
            num_guesses = max(1, round(share * inclusion.num_canaries))
            num_right = inclusion.guess(num_guesses)
            parameter = largest_refuted(
                least_size_gaussian
                if self.family == "gaussian"
                else lambda epsilon: least_size_approximate(epsilon, delta),
                num_canaries=inclusion.num_canaries,
                num_guesses=num_guesses,
                num_right=num_right,
                level=(1.0 - confidence) / len(self.guess_shares),
                largest=20.0,
            )
            best = max(best, (parameter, num_guesses, num_right))
        parameter, num_guesses, num_right = best
        gaussian = self.family == "gaussian"
        coins = "every canary is included by its own fair coin"
        return EstimatedBound(
            epsilon=gaussian_epsilon(parameter, delta) if gaussian else parameter,
            delta=delta,
            method=self.name,
            confidence=confidence,
            may_refute="Gaussian claims" if gaussian else "any claim",
            assumptions=(coins, "the trade-off curve is Gaussian") if gaussian else (coins,),
            counts={
                "num_canaries": inclusion.num_canaries,
                "num_guesses": num_guesses,
                "num_right": num_right,
            },
        )
