"""The smallest noise for a target: a search that always ends on the private side.

Calibration is no part of the core. Whatever it finds, the core prices what is run.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from shuffled_dpsgd.core.certified import claim_for
from shuffled_dpsgd.core.claim import Adjacency, PrivacyClaim
from shuffled_dpsgd.core.events import SampledGaussian, check_delta
from shuffled_dpsgd.core.pld import price
from shuffled_dpsgd.errors import InvalidArgumentError, require

SIGMA_ACCURACY = 5e-4
CALIBRATION_ERROR = 3e-4
SMALLEST_SIGMA = 1e-3
LARGEST_SIGMA = 1e6
FIRST_STRIDE = 0.1
FAR = 50.0
"""Of log ε: what no privacy and complete privacy count for in the search."""

Pricing = Callable[[float], float]


def check_epsilon(epsilon: float) -> None:
    """Refuse a target ε that is not a positive finite number."""
    expected = "a positive finite number"
    remedy = "typical budgets lie between 0.1 and 10"
    require(math.isfinite(epsilon) and epsilon > 0.0, "epsilon", expected, epsilon, remedy)


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """The smallest noise multiplier found for a target, and the claim it supports.

    `claim.epsilon` never exceeds the target it was asked for.
    """

    noise_multiplier: float
    claim: PrivacyClaim

    def to_json(self) -> dict[str, Any]:
        """The claim's data with the noise multiplier beside it."""
        return {"noise_multiplier": self.noise_multiplier, **self.claim.to_json()}


def smallest_noise_multiplier(epsilon: float, pricing: Pricing, *, guess: float) -> float:
    """The smallest σ with `pricing(σ) <= epsilon`, to `SIGMA_ACCURACY` relative and never below.

    `pricing` must decrease in σ. On logarithmic axes it is nearly straight, so few evaluations are
    needed.
    """
    from scipy.optimize import brentq

    check_epsilon(epsilon)

    @cache
    def gap(log_sigma: float) -> float:
        found = pricing(math.exp(log_sigma))
        return min(max(math.log(max(found, 1e-300) / epsilon), -FAR), FAR)

    least, most = math.log(SMALLEST_SIGMA), math.log(LARGEST_SIGMA)
    low = high = min(max(math.log(guess), least), most)
    stride = FIRST_STRIDE
    while gap(low) <= 0.0:
        if low == least:
            raise unreachable(epsilon, too_strict=False)
        low, stride = max(low - stride, least), 2.0 * stride
    stride = FIRST_STRIDE
    while gap(high) > 0.0:
        if high == most:
            raise unreachable(epsilon, too_strict=True)
        high, stride = min(high + stride, most), 2.0 * stride
    found = high if low == high else float(brentq(gap, low, high, xtol=0.4 * SIGMA_ACCURACY))
    more = 0.4 * SIGMA_ACCURACY
    while gap(found) > 0.0:
        found, more = found + more, 2.0 * more
    return math.exp(found)


def unreachable(epsilon: float, *, too_strict: bool) -> InvalidArgumentError:
    """The error for a target that no noise in the supported range meets exactly."""
    if too_strict:
        return InvalidArgumentError(
            "epsilon",
            expected=f"a budget that a noise multiplier up to {LARGEST_SIGMA:g} reaches",
            got=epsilon,
            remedy="raise epsilon or delta, or take fewer steps or smaller batches",
        )
    return InvalidArgumentError(
        "epsilon",
        expected=f"a budget that needs a noise multiplier of at least {SMALLEST_SIGMA:g}",
        got=epsilon,
        remedy="ask for a smaller epsilon; at this one the noise would protect nothing",
    )


def calibrate_certified(
    *,
    epsilon: float,
    delta: float,
    sampling_prob: float,
    num_steps: int,
    adjacency: Adjacency = "add-remove",
    **special: int | None,
) -> Calibration:
    """The smallest noise multiplier, to 1e-3 relative, whose certified ε is at most `epsilon`.

    The search is only a guess: what is claimed is what the core certifies at its result. `special`
    are further fields of a `SampledGaussian`: a largest batch with its data-set size, or blocks.
    """
    check_epsilon(epsilon)
    check_delta(delta)

    def mechanism(noise_multiplier: float) -> SampledGaussian:
        return SampledGaussian(
            noise_multiplier=noise_multiplier,
            sampling_prob=sampling_prob,
            num_steps=num_steps,
            adjacency=adjacency,
            **special,
        )

    noise = smallest_noise_multiplier(
        epsilon,
        lambda sigma: price(mechanism(sigma), delta, CALIBRATION_ERROR),
        guess=_first_guess(mechanism(1.0), epsilon, delta),
    )
    claim, more = claim_for(mechanism(noise), delta), SIGMA_ACCURACY / 4.0
    while claim.epsilon > epsilon:  # by less than the two accuracies differ
        noise, more = noise * (1.0 + more), 2.0 * more
        claim = claim_for(mechanism(noise), delta)
    return Calibration(noise_multiplier=noise, claim=claim)


def _first_guess(mechanism: SampledGaussian, epsilon: float, delta: float) -> float:
    """σ by the central limit theorem; only where the search starts, never what it returns."""
    from scipy.special import ndtri

    z = max(-float(ndtri(delta)), 1.0)
    mu = math.sqrt(z * z + 2.0 * epsilon) - z
    growth = (mu / mechanism.sampling_prob) ** 2 / mechanism.num_steps
    shift = 1.0 if mechanism.adjacency == "add-remove" else 2.0
    return shift / math.sqrt(math.log1p(growth))
