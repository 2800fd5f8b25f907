"""The guarantee anyone can rely on: the proven ε of a Poisson-sampled Gaussian mechanism.

The shuffle is a post-processing of that mechanism and is credited with nothing. Every ε here is an
upper bound on any lattice and includes the error of floats (`pld`); the lattice is chosen to cost
about `RELATIVE_ERROR`.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace

from shuffled_dpsgd.core.claim import Adjacency, PrivacyClaim
from shuffled_dpsgd.core.events import SampledGaussian, check_delta
from shuffled_dpsgd.core.pld import price
from shuffled_dpsgd.errors import InvalidArgumentError

METHOD = "PLD"
RELATIVE_ERROR = 5e-5
SMALLEST_DELTA = 1e-30
CURVE_KNOTS = 24
CURVE_ERROR = 2e-3
ASSUMPTIONS = (
    "every example joins each step independently with probability sampling_prob (Poisson)",
    "each example contributes at most clip_norm in Euclidean norm, over all parameters together",
    "Gaussian noise of at least noise_multiplier * clip_norm in every coordinate",
    "shuffling is credited with nothing",
)


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
    check_certifiable(delta)
    return claim_of(mechanism, delta, price(mechanism, delta, RELATIVE_ERROR))


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
    others up to `CURVE_ERROR` higher. ε grows with the number of steps. So any other count may be
    charged the next larger priced one, which its claim names, and the curve is monotone.
    """
    check_certifiable(delta)
    if not steps:
        return []
    longest = SampledGaussian(
        noise_multiplier=noise_multiplier,
        sampling_prob=sampling_prob,
        num_steps=max(steps),
        adjacency=adjacency,
    )
    knots = _knots(sorted(set(steps)))
    priced = {knots[-1]: price(longest, delta, RELATIVE_ERROR)}
    for knot, later in zip(knots[-2::-1], knots[:0:-1], strict=True):
        epsilon = price(replace(longest, num_steps=knot), delta, CURVE_ERROR)
        priced[knot] = min(epsilon, priced[later])
    claims = []
    for count in steps:
        knot = knots[bisect_left(knots, count)]
        claims.append(claim_of(replace(longest, num_steps=count), delta, priced[knot], knot))
    return claims


def claim_of(
    mechanism: SampledGaussian, delta: float, epsilon: float, priced_steps: int | None = None
) -> PrivacyClaim:
    """The claim that `price` supports, with everything it assumes."""
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


def check_certifiable(delta: float) -> None:
    """Refuse a δ outside (0, 1), or so small that nobody has compared its ε with another method."""
    check_delta(delta)
    if delta < SMALLEST_DELTA:
        raise InvalidArgumentError(
            "delta",
            expected=f"at least {SMALLEST_DELTA:g}",
            got=delta,
            remedy=f"use delta={SMALLEST_DELTA:g}",
        )


def _knots(steps: list[int]) -> list[int]:
    """A subset that always keeps the largest, spaced evenly in √T because ε grows like √T."""
    if len(steps) <= CURVE_KNOTS:
        return steps
    low, high = math.sqrt(steps[0]), math.sqrt(steps[-1])
    wanted = [
        (low + (high - low) * index / (CURVE_KNOTS - 1)) ** 2 for index in range(CURVE_KNOTS - 1)
    ]
    return sorted({steps[bisect_left(steps, value)] for value in wanted} | {steps[-1]})
