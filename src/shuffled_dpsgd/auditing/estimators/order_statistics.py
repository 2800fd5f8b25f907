"""Bounds at every threshold at once, at a proven level and without a held-out part.

Legend: k a rank of the out scores counted from the highest, N_k the number of present scores above
the k-th highest out score, h the largest true-positive rate a claim allows at each false-positive
rate (h = 1 − f for a trade-off function f; concave, increasing in the claim's parameter θ).

Proposition. Let the scores be independent, and let every test of the two worlds obey TPR ≤ h(FPR).
For any ranks k and counts v_k fixed beforehand,

    P[some N_k ≥ v_k] ≤ P[some W_(v_k) ≤ h(U_(k))],

where U_(k), W_(v) are the k-th and v-th smallest of independent uniforms, one per out and one per
present score.

Proof. Replace each score by the false-positive rate of "present when above it", ties broken at
random. Out scores become uniforms U. Present scores become V with P[V ≤ u] = G(u), the true-
positive rate of a test of size u, so G ≤ h. Draw V = G⁻¹(W) ≥ h⁻¹(W) from uniforms W. The k-th
highest out score is U_(k), N_k = #{V ≤ U_(k)} ≤ #{W ≤ h(U_(k))}, and the right side reaches v
exactly when W_(v) ≤ h(U_(k)). ∎

So the least favourable law is one known law, and a test of θ needs no approximation. The statistic
is T = max_k e_k(N_k), with e_k(v) the θ at which rank k alone would be refuted at a nominal level:
{T ≥ τ} is the event above with v_k = min{v : e_k(v) ≥ τ}. Given T, each draw of (U, W) crosses from
some θ on, in closed form. The bound is the ⌊level·(M+1)⌋-th smallest of M such θ: exactly the
inversion of the Monte-Carlo test with p = (1 + #crossed)/(M + 1), whose level holds for every M.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy.special import betainc, betaincinv, ndtr, ndtri

from shuffled_dpsgd.accounting import certified_bracket
from shuffled_dpsgd.accounting.theorem import gaussian_epsilon
from shuffled_dpsgd.auditing.estimators.scores import (
    EstimatedBound,
    Floats,
    ScorePair,
    check_levels,
)
from shuffled_dpsgd.errors import InvalidArgumentError

Family = Literal["any", "gaussian"]
Ranks = NDArray[np.int64]
RANK_RATIO = 1.25
NODES = 32
NOMINAL_SHARE = 0.2
"""A single rank's nominal level over the joint one: it weighs ranks, and cannot break the level."""
FEWEST_DRAWS = 4999
CROSSINGS = 20
LARGEST_PARAMETER = 60.0
STREAM = 0x5EED0F715
"""Keeps our draws apart from scores that were made with the same small seed."""
GAUSSIAN_STEPS = "the trade-off curve of a step is Gaussian"


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A growing family of h, and the θ from which h(u) ≥ w for some rank, draw by draw."""

    power: Callable[[Floats, Floats], Floats]
    crossing: Callable[[Floats, Floats], Floats]


def approximate_curve(delta: float) -> Curve:
    """(ε, δ)-DP in both directions: h(u) = min(1, δ + e^ε·u, 1 − e^−ε·(1 − δ − u))."""

    def power(epsilon: Floats, size: Floats) -> Floats:
        upper = 1.0 - np.exp(-epsilon) * np.maximum(1.0 - delta - size, 0.0)
        return np.minimum(np.minimum(delta + np.exp(epsilon) * size, upper), 1.0)

    def crossing(size: Floats, target: Floats) -> Floats:
        present, absent = (target - delta) / size, (1.0 - delta - size) / (1.0 - target)
        least: Floats = np.log(np.maximum(np.maximum(present, absent).min(axis=1), 1.0))
        return least

    return Curve(power=power, crossing=crossing)


def gaussian_curve() -> Curve:
    """μ-Gaussian DP: h(u) = Φ(Φ⁻¹(u) + μ)."""

    def power(mu: Floats, size: Floats) -> Floats:
        reached: Floats = ndtr(ndtri(size) + mu)
        return reached

    def crossing(size: Floats, target: Floats) -> Floats:
        least: Floats = np.maximum((ndtri(target) - ndtri(size)).min(axis=1), 0.0)
        return least

    return Curve(power=power, crossing=crossing)


@lru_cache(maxsize=32)
def examined_ranks(count: int) -> Ranks:
    """Ranks from 1 to `count`, each about `RANK_RATIO` times as far from its end as the last."""
    ranks = [1]
    while ranks[-1] < count / 2:
        ranks.append(max(ranks[-1] + 1, round(ranks[-1] * RANK_RATIO)))
    low = np.array([rank for rank in ranks if rank <= (count + 1) / 2], dtype=np.int64)
    return np.union1d(low, count + 1 - low)


def counts_above(scores: ScorePair, ranks: Ranks, rng: np.random.Generator) -> Ranks:
    """Present scores above the out scores of the given ranks, ties broken at random."""
    pooled = np.concatenate([scores.out, scores.present])
    is_out = np.arange(pooled.size) < scores.num_out
    order = np.lexsort((rng.random(pooled.size), pooled))[::-1]
    places = np.flatnonzero(is_out[order])[ranks - 1]
    return np.asarray(places - (ranks - 1), dtype=np.int64)


def uniform_order_statistics(
    count: int, ranks: Ranks, draws: int, rng: np.random.Generator
) -> Floats:
    """`draws` rows of the given order statistics (ascending ranks) of `count` uniforms."""
    gaps = np.diff(np.concatenate([[0], ranks, [count + 1]]))
    sums = np.cumsum(rng.standard_gamma(gaps, size=(draws, gaps.size)), axis=1)
    drawn: Floats = sums[:, :-1] / sums[:, -1:]
    return drawn


class SingleRanks:
    """What each rank would say by itself, at the nominal level: the statistic's e_k(v).

    A present score lies above an out score of size U with probability h(U), so N_k ≥ v has
    probability E[I_h(U)(v, n − v + 1)] under the least favourable law, U ~ Beta(k, m − k + 1).
    Taken at `NODES` quantiles of U: monotone in v and θ, which is all that validity needs.
    """

    def __init__(self, curve: Curve, ranks: Ranks, num_out: int, num_present: int, level: float):
        self._curve, self._num_present, self._level = curve, num_present, level
        quantiles = (np.arange(NODES) + 0.5) / NODES
        first, second = ranks[:, None].astype(np.float64), num_out - ranks[:, None] + 1.0
        self._sizes = np.asarray(betaincinv(first, second, quantiles[None]), dtype=np.float64)

    def refuted(self, parameter: Floats, counts: Ranks) -> NDArray[np.bool_]:
        """Whether each rank refutes its parameter with its count."""
        inside = np.clip(counts, 1, self._num_present)[:, None].astype(float)
        power = self._curve.power(np.reshape(parameter, (-1, 1)), self._sizes)
        tail = betainc(inside, self._num_present - inside + 1.0, power).mean(axis=1)
        refuted: NDArray[np.bool_] = (tail <= self._level) & (counts > 0)
        return refuted | (counts > self._num_present)

    def largest_refuted(self, counts: Ranks) -> Floats:
        """e_k(N_k) of every rank; zero where nothing is refuted."""
        low, high = np.zeros(counts.size), np.full(counts.size, LARGEST_PARAMETER)
        while (high - low).max() > 1e-4:
            middle = 0.5 * (low + high)
            refuted = self.refuted(middle, counts)
            low, high = np.where(refuted, middle, low), np.where(refuted, high, middle)
        return low

    def fewest_counts(self, parameter: float) -> Ranks:
        """v_k: the least count with which each rank refutes `parameter`; one too many if none."""
        low = np.zeros(self._sizes.shape[0], dtype=np.int64)
        high = np.full(low.size, self._num_present + 1, dtype=np.int64)
        everywhere = np.full(low.size, parameter)
        while (high - low).max() > 1:
            middle = (low + high) // 2
            refuted = self.refuted(everywhere, middle)
            low, high = np.where(refuted, low, middle), np.where(refuted, middle, high)
        return high


@dataclass(frozen=True, kw_only=True)
class OrderStatistics:
    """Lower bound over (ε, δ) curves (`any`) or Gaussian ones (`gaussian`); higher means present.

    Valid for every mechanism, sample size and score, ties included. The `gaussian` family bounds
    the μ of one step; its ε is that of `num_steps` such steps, each joined with probability
    `sampling_prob`, and holds for that mechanism alone. `seed` breaks ties and draws the reference
    law; it must not depend on the scores.
    """

    family: Family = "any"
    sampling_prob: float = 1.0
    num_steps: int = 1
    seed: int = 0
    reads: type = ScorePair

    def __post_init__(self) -> None:
        if self.family not in ("any", "gaussian"):
            raise InvalidArgumentError("family", expected="any or gaussian", got=self.family)

    @property
    def name(self) -> str:
        return "order-statistics" if self.family == "any" else "order-statistics-gaussian"

    def lower_bound(
        self, scores: ScorePair, *, delta: float, confidence: float = 0.95
    ) -> EstimatedBound:
        check_levels(delta=delta, confidence=confidence)
        curve = approximate_curve(delta) if self.family == "any" else gaussian_curve()
        level = 1.0 - confidence
        rng = np.random.default_rng([STREAM, self.seed])
        ranks = examined_ranks(scores.num_out)
        counts = counts_above(scores, ranks, rng)
        single = SingleRanks(
            curve, ranks, scores.num_out, scores.num_present, NOMINAL_SHARE * level
        )
        alone = single.largest_refuted(counts)
        best = int(np.argmax(alone))
        bound = 0.0
        if alone[best] > 0.0:
            needed = np.minimum(single.fewest_counts(float(alone[best])), scores.num_present + 1)
            bound = smallest_crossings(curve, scores, ranks, needed, level, rng)
        found = {
            "false_positives": int(ranks[best]) - 1,
            "num_out": scores.num_out,
            "false_negatives": scores.num_present - int(counts[best]),
            "num_present": scores.num_present,
        }
        return self._stated(bound, found, delta=delta, confidence=confidence)

    def _stated(
        self, bound: float, counts: dict[str, int], *, delta: float, confidence: float
    ) -> EstimatedBound:
        """The bound with what it assumes, and for which claims it counts."""
        found = EstimatedBound(
            epsilon=bound,
            delta=delta,
            method=self.name,
            confidence=confidence,
            may_refute="any claim",
            assumptions=("observations are independent",),
            counts=counts,
        )
        if self.family == "any":
            return found
        run: Any = {"sampling_prob": self.sampling_prob, "num_steps": self.num_steps}
        return replace(
            found,
            epsilon=composed_epsilon(bound, delta=delta, **run),
            may_refute="Gaussian claims",
            assumptions=(*found.assumptions, GAUSSIAN_STEPS),
            counts={**counts, "mu": bound, **run},
        )


def smallest_crossings(
    curve: Curve,
    scores: ScorePair,
    ranks: Ranks,
    needed: Ranks,
    level: float,
    rng: np.random.Generator,
) -> float:
    """The ⌊level·(M+1)⌋-th smallest θ at which a draw of the least favourable law crosses."""
    draws = max(FEWEST_DRAWS, math.ceil(CROSSINGS / level) - 1)
    within = needed <= scores.num_present
    sizes = uniform_order_statistics(scores.num_out, ranks[within], draws, rng)
    distinct, where = np.unique(needed[within], return_inverse=True)
    targets = uniform_order_statistics(scores.num_present, distinct, draws, rng)[:, where]
    crossings = curve.crossing(sizes, targets)
    # 1e-9: level·(M+1) is often a whole number that rounding would push just below.
    allowed = math.floor(level * (draws + 1) + 1e-9)
    return float(np.partition(crossings, allowed - 1)[allowed - 1])


def composed_epsilon(mu: float, *, sampling_prob: float, num_steps: int, delta: float) -> float:
    """ε of `num_steps` Poisson-sampled steps that are each μ-GDP when the canary takes part.

    Never above the exact value: the lower end of the accountant's bracket. It grows with μ, so a
    lower bound on μ gives one on ε, for mechanisms that are Gaussian in every step.
    """
    if mu <= 0.0:
        return 0.0
    if (sampling_prob, num_steps) == (1.0, 1):
        return gaussian_epsilon(1.0 / mu, delta)
    return certified_bracket(
        noise_multiplier=1.0 / mu, sampling_prob=sampling_prob, num_steps=num_steps, delta=delta
    ).lower
