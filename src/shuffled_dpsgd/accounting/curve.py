"""Proven claims along a run, for displays: few are priced, the others charged the next one."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace

from shuffled_dpsgd.core.certified import RELATIVE_ERROR, check_certifiable, claim_of
from shuffled_dpsgd.core.claim import Adjacency, PrivacyClaim
from shuffled_dpsgd.core.events import SampledGaussian
from shuffled_dpsgd.core.pld import price

CURVE_KNOTS = 24
CURVE_ERROR = 2e-3


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


def _knots(steps: list[int]) -> list[int]:
    """A subset that always keeps the largest, spaced evenly in √T because ε grows like √T."""
    if len(steps) <= CURVE_KNOTS:
        return steps
    low, high = math.sqrt(steps[0]), math.sqrt(steps[-1])
    wanted = [
        (low + (high - low) * index / (CURVE_KNOTS - 1)) ** 2 for index in range(CURVE_KNOTS - 1)
    ]
    return sorted({steps[bisect_left(steps, value)] for value in wanted} | {steps[-1]})
