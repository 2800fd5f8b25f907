"""The smallest noise for a target: a search that always ends on the private side.

Calibration is no part of the core. Whatever it finds, the core prices what is run.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shuffled_dpsgd.core.certified import certified_claim
from shuffled_dpsgd.core.claim import Adjacency, PrivacyClaim
from shuffled_dpsgd.core.events import SampledGaussian, check_delta
from shuffled_dpsgd.core.pld import price
from shuffled_dpsgd.errors import InvalidArgumentError

SIGMA_ACCURACY = 5e-4
CALIBRATION_ERROR = 3e-4
COARSE_ERROR = 5e-3
SMALLEST_SIGMA = 1e-3
LARGEST_SIGMA = 1e6

Pricing = Callable[[float], float]


def check_epsilon(epsilon: float) -> None:
    """Refuse a target ε that is not a positive finite number."""
    if not (math.isfinite(epsilon) and epsilon > 0.0):
        raise InvalidArgumentError(
            "epsilon",
            expected="a positive finite number",
            got=epsilon,
            remedy="typical budgets lie between 0.1 and 10",
        )


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


def smallest_noise_multiplier(
    epsilon: float, *, coarse: Pricing, fine: Pricing, guess: float
) -> float:
    """The smallest σ with `fine(σ) <= epsilon`, to `SIGMA_ACCURACY` relative and never below.

    `fine` must decrease in σ; `coarse` is a cheap upper estimate that brings the search close.
    Both are seen on logarithmic axes, where ε(σ) is nearly straight, so few evaluations are needed.
    """
    check_epsilon(epsilon)
    start = min(max(guess, SMALLEST_SIGMA), LARGEST_SIGMA)
    _, near = _bracketed(epsilon, coarse, start, spread=1.2, accuracy=20 * SIGMA_ACCURACY)
    _, sigma = _bracketed(epsilon, fine, near, spread=1.01, accuracy=SIGMA_ACCURACY)
    return sigma


def _bracketed(
    epsilon: float, pricing: Pricing, start: float, *, spread: float, accuracy: float
) -> tuple[float, float]:
    """A pair (too little noise, enough noise) closer together than `accuracy`, relative."""
    low, high, low_gap, high_gap = _expand(epsilon, pricing, start, spread)
    while high > low * (1.0 + accuracy):
        middle = _interpolate(low, high, low_gap, high_gap, accuracy)
        gap = _gap(pricing(middle), epsilon)
        if gap > 0.0:
            low, low_gap = middle, gap
        else:
            high, high_gap = middle, gap
    return low, high


def _expand(
    epsilon: float, pricing: Pricing, start: float, spread: float
) -> tuple[float, float, float, float]:
    """Walk outwards from `start`, in growing strides, until the target lies in between."""
    sigma, gap = start, _gap(pricing(start), epsilon)
    direction = 1.0 if gap > 0.0 else -1.0
    stride = math.log(spread)
    while True:
        further = sigma * math.exp(direction * stride)
        if not SMALLEST_SIGMA <= further <= LARGEST_SIGMA:
            raise unreachable(epsilon, too_strict=direction > 0)
        further_gap = _gap(pricing(further), epsilon)
        if (further_gap > 0.0) != (gap > 0.0):
            ends = sorted([(sigma, gap), (further, further_gap)])
            return ends[0][0], ends[1][0], ends[0][1], ends[1][1]
        sigma, gap, stride = further, further_gap, 2.0 * stride


def _interpolate(
    low: float, high: float, low_gap: float, high_gap: float, accuracy: float
) -> float:
    """Regula falsi in log-log, aimed slightly to the private side and kept off the ends."""
    width = math.log(high / low)
    if math.isfinite(low_gap) and math.isfinite(high_gap) and low_gap > high_gap:
        share = low_gap / (low_gap - high_gap) + 0.4 * accuracy / width
    else:
        share = 0.5
    return low * math.exp(width * min(max(share, 0.05), 0.95))


def _gap(epsilon: float, target: float) -> float:
    if epsilon <= 0.0:
        return -50.0
    return math.log(epsilon / target) if math.isfinite(epsilon) else math.inf


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
) -> Calibration:
    """The smallest noise multiplier, to 1e-3 relative, whose certified ε is at most `epsilon`.

    The search is only a guess: what is claimed is what the core certifies at its result.
    """
    check_epsilon(epsilon)
    check_delta(delta)

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
    claim = certified_claim(**mechanism(noise).to_json(), delta=delta)
    while claim.epsilon > epsilon:  # by less than the two accuracies differ
        noise *= 1.0 + SIGMA_ACCURACY / 4.0
        claim = certified_claim(**mechanism(noise).to_json(), delta=delta)
    return Calibration(noise_multiplier=noise, claim=claim)


def _first_guess(mechanism: SampledGaussian, epsilon: float, delta: float) -> float:
    """σ by the central limit theorem; only where the search starts, never what it returns."""
    from scipy.special import ndtri

    z = max(-float(ndtri(delta)), 1.0)
    mu = math.sqrt(z * z + 2.0 * epsilon) - z
    growth = (mu / mechanism.sampling_prob) ** 2 / mechanism.num_steps
    shift = 1.0 if mechanism.adjacency == "add-remove" else 2.0
    return shift / math.sqrt(math.log1p(growth))
