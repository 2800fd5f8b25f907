"""The guarantee anyone can rely on: privacy-loss distributions of the Poisson-sampled Gaussian.

The shuffle is a post-processing of the Gaussian mechanism and is credited with nothing. Every ε
here is an upper bound whatever the grid; the grid is chosen to cost about `RELATIVE_ERROR`. Coarse
grids take milliseconds, so a calibration is coarse until it is close.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

from shuffled_dpsgd.accounting.pld import MANY_STEPS, epsilon_at, optimistic, price, refine
from shuffled_dpsgd.accounting.rdp import rdp_epsilon
from shuffled_dpsgd.accounting.search import smallest_noise_multiplier
from shuffled_dpsgd.core.claim import Adjacency, Calibration, Kind, PrivacyClaim
from shuffled_dpsgd.core.events import SampledGaussian, check_delta, check_epsilon
from shuffled_dpsgd.errors import InvalidArgumentError

METHOD = "PLD"
RELATIVE_ERROR = 1e-4
CALIBRATION_ERROR = 3e-4
COARSE_ERROR = 5e-3
# Below this the float64 Fourier transform's own rounding is no longer negligible against delta.
SMALLEST_DELTA = 1e-12
CURVE_KNOTS = 24
CURVE_ERROR = 2e-3
ASSUMPTIONS = (
    "every example joins each step independently with probability sampling_prob (Poisson)",
    "each example contributes at most clip_norm in Euclidean norm, over all parameters together",
    "Gaussian noise of at least noise_multiplier * clip_norm in every coordinate",
    "shuffling is credited with nothing",
)


@dataclass(frozen=True, kw_only=True)
class Bracket:
    """A proven interval that contains the exact ε of the mechanism."""

    lower: float
    upper: float
    kind: Kind = "proven"


def certified_claim(
    *,
    noise_multiplier: float,
    sampling_prob: float,
    num_steps: int,
    delta: float,
    adjacency: Adjacency = "add-remove",
) -> PrivacyClaim:
    """The proven ε of a run: never below the exact one, and about `RELATIVE_ERROR` above it.

    Holds for one release of any checkpoint and for the release of all of them, since every step's
    output is assumed public. With `adjacency="replace-one"` both neighbouring data sets hold the
    example, with different values, and ε is larger.
    """
    mechanism = SampledGaussian(
        noise_multiplier=noise_multiplier,
        sampling_prob=sampling_prob,
        num_steps=num_steps,
        adjacency=adjacency,
    )
    _check_delta(delta)
    claim = _claim(mechanism, delta, price(mechanism, delta, RELATIVE_ERROR))
    if num_steps < MANY_STEPS or adjacency != "add-remove":
        return claim
    # Over so many steps float64 allows coarse grids only, and the looser method can be the closer.
    by_moments = rdp_epsilon(mechanism, delta)
    if by_moments >= claim.epsilon:
        return claim
    return replace(claim, epsilon=by_moments, method="Rényi DP")


def certified_curve(
    *,
    noise_multiplier: float,
    sampling_prob: float,
    steps: Sequence[int],
    delta: float,
    adjacency: Adjacency = "add-remove",
) -> list[PrivacyClaim]:
    """One proven claim per step count, cheap enough for a progress display.

    At most `CURVE_KNOTS` step counts are priced, the last exactly as `certified_claim` does, the
    others on a coarser common grid, up to `CURVE_ERROR` higher. Any other count is charged the next
    larger priced one, an upper bound because ε grows with the number of steps. Each claim says for
    how many steps it was priced. Monotone in the step count.
    """
    _check_delta(delta)
    if not steps:
        return []
    longest = SampledGaussian(
        noise_multiplier=noise_multiplier,
        sampling_prob=sampling_prob,
        num_steps=max(steps),
        adjacency=adjacency,
    )
    knots = _knots(sorted(set(steps)))
    final = price(longest, delta, RELATIVE_ERROR)
    spacing, _ = refine(longest, delta, CURVE_ERROR)
    priced = {knots[-1]: final}
    for knot in knots[:-1]:
        epsilon = epsilon_at(_with_steps(longest, knot), delta, spacing, pessimistic=True)
        # Fewer steps never cost more, so the finer figure for all of them is a bound as well.
        priced[knot] = min(epsilon, final)
    claims = []
    for count in steps:
        knot = knots[bisect_left(knots, count)]
        claims.append(_claim(_with_steps(longest, count), delta, priced[knot], knot))
    return claims


def calibrate_certified(
    *,
    epsilon: float,
    delta: float,
    sampling_prob: float,
    num_steps: int,
    adjacency: Adjacency = "add-remove",
) -> Calibration:
    """The smallest noise multiplier, to 1e-3 relative, whose certified ε is at most `epsilon`."""
    check_epsilon(epsilon)
    _check_delta(delta)

    def mechanism(noise_multiplier: float) -> SampledGaussian:
        return SampledGaussian(
            noise_multiplier=noise_multiplier,
            sampling_prob=sampling_prob,
            num_steps=num_steps,
            adjacency=adjacency,
        )

    noise = smallest_noise_multiplier(
        epsilon,
        coarse=lambda sigma: price(mechanism(sigma), delta, COARSE_ERROR),
        fine=lambda sigma: price(mechanism(sigma), delta, CALIBRATION_ERROR),
        guess=_first_guess(mechanism(1.0), epsilon, delta),
    )
    claim = _claim(mechanism(noise), delta, price(mechanism(noise), delta, RELATIVE_ERROR))
    return Calibration(noise_multiplier=noise, claim=claim)


def certified_bracket(
    *,
    noise_multiplier: float,
    sampling_prob: float,
    num_steps: int,
    delta: float,
    adjacency: Adjacency = "add-remove",
) -> Bracket:
    """Optimistic and pessimistic roundings of the same distribution: the exact ε lies between.

    The upper end is `certified_claim`'s. The lower end rounds every privacy loss down
    (privacy buckets), which is looser: about half a per cent below.
    """
    mechanism = SampledGaussian(
        noise_multiplier=noise_multiplier,
        sampling_prob=sampling_prob,
        num_steps=num_steps,
        adjacency=adjacency,
    )
    _check_delta(delta)
    upper = certified_claim(**mechanism.to_json(), delta=delta).epsilon
    lower = optimistic(mechanism, delta, COARSE_ERROR * upper)
    return Bracket(lower=min(lower, upper), upper=upper)


def _knots(steps: list[int]) -> list[int]:
    """A subset that always keeps the largest, spaced evenly in √T because ε grows like √T."""
    if len(steps) <= CURVE_KNOTS:
        return steps
    low, high = math.sqrt(steps[0]), math.sqrt(steps[-1])
    wanted = [
        (low + (high - low) * index / (CURVE_KNOTS - 1)) ** 2 for index in range(CURVE_KNOTS - 1)
    ]
    return sorted({steps[bisect_left(steps, value)] for value in wanted} | {steps[-1]})


def _with_steps(mechanism: SampledGaussian, num_steps: int) -> SampledGaussian:
    return SampledGaussian(**{**mechanism.to_json(), "num_steps": num_steps})


def _claim(
    mechanism: SampledGaussian, delta: float, epsilon: float, priced_steps: int | None = None
) -> PrivacyClaim:
    inputs = mechanism.to_json()
    if priced_steps is not None:
        inputs["priced_num_steps"] = priced_steps
    relation = f"neighbouring data sets differ by {mechanism.adjacency}"
    return PrivacyClaim(
        epsilon=epsilon,
        delta=delta,
        method=METHOD,
        kind="proven",
        assumptions=(*ASSUMPTIONS, relation),
        inputs=inputs,
    )


def _first_guess(mechanism: SampledGaussian, epsilon: float, delta: float) -> float:
    """σ by the central limit theorem; only where the search starts, never what it returns."""
    from scipy.special import ndtri

    z = max(-float(ndtri(delta)), 1.0)
    mu = math.sqrt(z * z + 2.0 * epsilon) - z
    growth = (mu / mechanism.sampling_prob) ** 2 / mechanism.num_steps
    shift = 1.0 if mechanism.adjacency == "add-remove" else 2.0
    return shift / math.sqrt(math.log1p(growth))


def _check_delta(delta: float) -> None:
    check_delta(delta)
    if delta < SMALLEST_DELTA:
        raise InvalidArgumentError(
            "delta",
            expected=f"at least {SMALLEST_DELTA:g} (float64 Fourier transforms resolve no less)",
            got=delta,
            remedy=f"use delta={SMALLEST_DELTA:g}",
        )
