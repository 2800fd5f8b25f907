"""Privacy auditing with one training run, assuming nothing but fair coins.

m canaries are each included with probability one half, independently; the adversary guesses the
inclusion of some of them and abstains on the rest (Steinke, Nasr, Jagielski 2023). The bound is
that of Mahloujifar, Melis and Chaudhuri (2024), which loses less to δ when there are many canaries.

Legend: g guesses of which W are right, f̄(x) = 1 − f(x) the largest power at size x that the
trade-off function f of (ε, δ)-DP allows. Flipping the bit of canary j turns "j guessed right and
W = i" into "j guessed wrong and W = i − 1" on the same output. Applying f-DP to the event
W ∈ {i+1, …, g} for each j and averaging (f̄ is concave) gives, with p_i = P[W = i],

    R_{i+1} ≤ f̄(H_i),   R_i = Σ_{j≥i} (j/m)·p_j,   H_i = Σ_{j≥i} ((g−j)/m)·p_j.

Suppose P[W ≥ v] = τ. The smallest total mass is reached when all of the tail sits at v; the
recursion then adds, level by level, the least mass the inequalities demand. If that needs more
than Σ p_j = 1, then P[W ≥ v] < τ, and having seen W ≥ v refutes (ε, δ) at error level τ.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import numpy as np

from shuffled_dpsgd.auditing.estimators.scores import EstimatedBound, Inclusion, check_levels

LARGEST_EPSILON = 20.0
ACCURACY = 1e-4


def least_size(power: float, *, epsilon: float, delta: float) -> float:
    """f̄⁻¹: the least size (false-positive mass) with which (ε, δ)-DP allows this power."""
    first = (power - delta) * math.exp(-epsilon)
    second = 1.0 - delta - (1.0 - power) * math.exp(epsilon)
    return max(first, second, 0.0)


@dataclass(frozen=True, kw_only=True)
class Guesses:
    """How many canaries there are, how many were guessed, and how many of those rightly."""

    num_canaries: int
    num_guesses: int
    num_right: int

    @classmethod
    def of(cls, inclusion: Inclusion, num_guesses: int) -> Guesses:
        """Call the highest half of `num_guesses` present and the lowest half absent."""
        order = np.argsort(inclusion.scores, kind="stable")
        lowest, highest = num_guesses // 2, num_guesses - num_guesses // 2
        right_low = int((~inclusion.included[order[:lowest]]).sum())
        right_high = int(inclusion.included[order[inclusion.num_canaries - highest :]].sum())
        return cls(
            num_canaries=inclusion.num_canaries,
            num_guesses=num_guesses,
            num_right=right_low + right_high,
        )

    def refute(self, epsilon: float, *, delta: float, level: float) -> bool:
        """Whether so many right guesses are too many, at error level `level`, for (ε, δ)-DP."""
        m, g, v = self.num_canaries, self.num_guesses, self.num_right
        right, wrong = level * v / m, level * (g - v) / m
        for i in range(v - 1, -1, -1):
            needed = least_size(right, epsilon=epsilon, delta=delta)
            if needed <= wrong:
                return False  # nothing more is demanded here, so nothing further down either
            right += (needed - wrong) * i / (g - i)
            wrong = needed
            if right + wrong > g / m:
                return True
        return False

    def largest_refuted(self, *, delta: float, level: float) -> float:
        """The largest ε that is refuted, to `ACCURACY` below: all smaller ones are as well."""
        if not self.refute(0.0, delta=delta, level=level):
            return 0.0
        low, high = 0.0, LARGEST_EPSILON
        while high - low > ACCURACY:
            middle = 0.5 * (low + high)
            refuted = self.refute(middle, delta=delta, level=level)
            low, high = (middle, high) if refuted else (low, middle)
        return low


@dataclass(frozen=True, kw_only=True)
class OneRunFDP:
    """Lower bound from one run; shares of canaries to guess are fixed, Bonferroni over them."""

    guess_shares: tuple[float, ...] = (0.02, 0.1, 0.4, 1.0)
    name: str = "one-run-fdp"
    reads: type = Inclusion

    def lower_bound(
        self, inclusion: Inclusion, *, delta: float, confidence: float = 0.95
    ) -> EstimatedBound:
        check_levels(delta=delta, confidence=confidence)
        level = (1.0 - confidence) / len(self.guess_shares)
        tried = [
            Guesses.of(inclusion, max(1, round(share * inclusion.num_canaries)))
            for share in self.guess_shares
        ]
        refuted = [guesses.largest_refuted(delta=delta, level=level) for guesses in tried]
        best = int(np.argmax(refuted))
        return EstimatedBound(
            epsilon=refuted[best],
            delta=delta,
            method=self.name,
            confidence=confidence,
            may_refute="any claim",
            assumptions=("every canary is included by its own fair coin",),
            counts=asdict(tried[best]),
        )
