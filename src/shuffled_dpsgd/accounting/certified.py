"""The guarantee anyone can rely on: privacy-loss distributions of the Poisson-sampled Gaussian.

The shuffle is a post-processing of the Gaussian mechanism and is credited with nothing. Every
figure here is pessimistic: the distribution is rounded upwards (connect-the-dots, Doroshenko et
al. 2022), so refining the grid can only lower ε. The grid is refined until the rounding costs less
than `RELATIVE_ERROR`; coarse grids cost milliseconds, so most of a calibration is coarse.

Legend: σ noise_multiplier, q sampling_prob, T num_steps, h grid spacing of the privacy loss.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from shuffled_dpsgd.accounting.claim import Adjacency, Calibration, PrivacyClaim
from shuffled_dpsgd.accounting.events import SampledGaussian, check_delta, check_epsilon
from shuffled_dpsgd.accounting.search import smallest_noise_multiplier
from shuffled_dpsgd.errors import InvalidArgumentError

METHOD = "PLD"
RELATIVE_ERROR = 1e-4
CALIBRATION_ERROR = 3e-4
COARSE_ERROR = 5e-3
# Below this the float64 Fourier transform's own rounding is no longer negligible against delta.
SMALLEST_DELTA = 1e-12
# dp_accounting drops tails of probability e^-50, that is beyond about ten standard deviations.
TAIL_DEVIATIONS = 10.0
LARGEST_GRID = 4_000_000
CURVE_KNOTS = 24
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


def certified_claim(
    *,
    noise_multiplier: float,
    sampling_prob: float,
    num_steps: int,
    delta: float,
    adjacency: Adjacency = "add-remove",
) -> PrivacyClaim:
    """The proven ε of a run: never below the exact one, and within `RELATIVE_ERROR` of it.

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
    return _claim(mechanism, delta, price(mechanism, delta, RELATIVE_ERROR))


def certified_curve(
    *,
    noise_multiplier: float,
    sampling_prob: float,
    steps: Sequence[int],
    delta: float,
    adjacency: Adjacency = "add-remove",
) -> list[PrivacyClaim]:
    """One proven claim per step count, cheap enough for a progress display.

    At most `CURVE_KNOTS` step counts are priced, on one common grid; any other is charged the next
    larger priced count, which is an upper bound because ε grows with the number of steps. Each
    claim says for how many steps it was priced. Monotone in the step count.
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
    spacing, _ = _refine(longest, delta, RELATIVE_ERROR)
    priced = {
        knot: _epsilon(_with_steps(longest, knot), delta, spacing, pessimistic=True)
        for knot in knots
    }
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
    (privacy buckets), which shifts ε by up to T * h, so its grid is finer and still looser.
    """
    mechanism = SampledGaussian(
        noise_multiplier=noise_multiplier,
        sampling_prob=sampling_prob,
        num_steps=num_steps,
        adjacency=adjacency,
    )
    _check_delta(delta)
    if noise_multiplier == 0.0:
        return Bracket(lower=math.inf, upper=math.inf)
    spacing, upper = _refine(mechanism, delta, RELATIVE_ERROR)
    wanted = 2.0 * COARSE_ERROR * upper / _composed(mechanism)[1]
    finest = _loss_range(mechanism) / (LARGEST_GRID / 40)
    lower_spacing = min(spacing, max(wanted, finest))
    lower = _epsilon(mechanism, delta, lower_spacing, pessimistic=False)
    return Bracket(lower=min(lower, upper), upper=upper)


def price(mechanism: SampledGaussian, delta: float, relative_error: float) -> float:
    """The pessimistic ε with its rounding error held below `relative_error`; inf without noise."""
    if mechanism.noise_multiplier == 0.0:
        return math.inf
    return _refine(mechanism, delta, relative_error)[1]


@lru_cache(maxsize=4096)
def _refine(mechanism: SampledGaussian, delta: float, relative_error: float) -> tuple[float, float]:
    """Halve the grid until the rounding error is small: (spacing, ε)."""
    spacing = _power_of_two(_loss_range(mechanism) / 2000.0)
    finest = _power_of_two(_loss_range(mechanism) / LARGEST_GRID)
    while True:
        epsilon = _epsilon(mechanism, delta, spacing, pessimistic=True)
        wanted = max(_spacing_for(mechanism, epsilon, delta, relative_error), finest)
        if spacing <= wanted:
            return spacing, epsilon
        spacing = max(min(spacing / 2.0, _power_of_two(wanted)), finest)


def _spacing_for(
    mechanism: SampledGaussian, epsilon: float, delta: float, relative_error: float
) -> float:
    """The spacing whose rounding costs about `relative_error`.

    Connecting the dots splits a loss between its two neighbours on the grid, which adds a variance
    of about h²/6 a step. Reading the composed loss as Gaussian, ε = μ²/2 + zμ, that variance
    T·h²/6 raises ε by T·h²/6 · (1/2 + z/(2μ)). An estimate: it steers accuracy, never soundness.
    """
    from scipy.special import ndtri

    if not math.isfinite(epsilon):
        return 0.0
    allowed = max(relative_error * epsilon, 1e-7)
    z = max(-float(ndtri(delta)), 1.0)
    mu = math.sqrt(z * z + 2.0 * max(epsilon, 1e-6)) - z
    slope = 0.5 + z / (2.0 * mu)
    return math.sqrt(6.0 * allowed / (_composed(mechanism)[1] * slope))


def _epsilon(
    mechanism: SampledGaussian, delta: float, spacing: float, *, pessimistic: bool
) -> float:
    if mechanism.noise_multiplier == 0.0:
        return math.inf
    noise, count = _composed(mechanism)
    distribution = _distribution(
        noise, mechanism.sampling_prob, mechanism.adjacency, spacing, pessimistic
    )
    composed = distribution if count == 1 else distribution.self_compose(count)
    return float(composed.get_epsilon_for_delta(delta))


@lru_cache(maxsize=8)
def _distribution(
    noise_multiplier: float,
    sampling_prob: float,
    adjacency: Adjacency,
    spacing: float,
    pessimistic: bool,
) -> Any:
    from dp_accounting import NeighboringRelation
    from dp_accounting.pld import privacy_loss_distribution

    relation = {
        "add-remove": NeighboringRelation.ADD_OR_REMOVE_ONE,
        "replace-one": NeighboringRelation.REPLACE_ONE,
    }[adjacency]
    return privacy_loss_distribution.from_gaussian_mechanism(
        noise_multiplier,
        sampling_prob=sampling_prob,
        value_discretization_interval=spacing,
        pessimistic_estimate=pessimistic,
        use_connect_dots=pessimistic,
        neighboring_relation=relation,
    )


def _composed(mechanism: SampledGaussian) -> tuple[float, int]:
    """Without sampling, T releases at σ are exactly one release at σ/√T."""
    if mechanism.sampling_prob == 1.0:
        return mechanism.noise_multiplier / math.sqrt(mechanism.num_steps), 1
    return mechanism.noise_multiplier, mechanism.num_steps


def _loss_range(mechanism: SampledGaussian) -> float:
    noise = _composed(mechanism)[0]
    shift = 1.0 if mechanism.adjacency == "add-remove" else 2.0
    return shift * TAIL_DEVIATIONS / noise + 0.5 * (shift / noise) ** 2


def _power_of_two(value: float) -> float:
    """The largest power of two not above `value`: grids then nest, and refining only lowers ε."""
    return 2.0 ** math.floor(math.log2(value))


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
