"""Pessimistic and optimistic ε of the Poisson-sampled Gaussian, on grids as coarse as allowed.

Privacy losses are rounded to a grid of spacing h, convolved T times by Fourier transform and read
off at δ, all through `dp_accounting`. Rounding upwards by connecting the dots (Doroshenko et al.
2022) costs O(h²) a step and keeps ε an upper bound on any grid, so soundness never depends on h;
only accuracy does. The grid is therefore refined just as far as the wanted accuracy needs.

Legend: σ noise_multiplier, T num_steps, h spacing.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

from shuffled_dpsgd.core.claim import Adjacency
from shuffled_dpsgd.core.events import SampledGaussian

# dp_accounting drops tails of probability e^-50, that is beyond about ten standard deviations.
TAIL_DEVIATIONS = 10.0
CUT_TAILS = 1e-15
LARGEST_GRID = 4_000_000
MANY_STEPS = 1_000_000
LARGEST_SHIFT = 600.0
LARGEST_OPTIMISTIC_GRID = 100_000


def price(mechanism: SampledGaussian, delta: float, relative_error: float) -> float:
    """The pessimistic ε with its rounding error held below `relative_error`; inf without noise."""
    return refine(mechanism, delta, relative_error)[1]


@lru_cache(maxsize=4096)
def refine(mechanism: SampledGaussian, delta: float, relative_error: float) -> tuple[float, float]:
    """Refine the grid until the rounding error is small: (spacing, ε); (1, inf) without noise."""
    if mechanism.noise_multiplier == 0.0:
        return 1.0, math.inf
    spacing = _power_of_two(_loss_range(mechanism) / 2000.0)
    finest = _power_of_two(_loss_range(mechanism) / LARGEST_GRID)
    coarser = (1.0, math.inf)
    while True:
        epsilon = epsilon_at(mechanism, delta, spacing, pessimistic=True)
        if epsilon > coarser[1]:
            # Grids nest, so a finer one can only lower ε: what raised it is float64's own rounding,
            # times the number of steps, and a finer grid has more of it.
            return coarser
        wanted = max(_spacing_for(mechanism, epsilon, delta, relative_error), finest)
        if spacing <= wanted:
            return spacing, epsilon
        coarser = (spacing, epsilon)
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


def epsilon_at(
    mechanism: SampledGaussian, delta: float, spacing: float, *, pessimistic: bool
) -> float:
    """ε at `delta` with losses rounded to a grid of `spacing`, upwards or downwards."""
    if mechanism.noise_multiplier == 0.0:
        return math.inf
    noise, count = _composed(mechanism)
    distribution = _distribution(
        noise, mechanism.sampling_prob, mechanism.adjacency, spacing, pessimistic
    )
    return float(_self_composed(distribution, count).get_epsilon_for_delta(delta))


def _self_composed(distribution: Any, count: int) -> Any:
    """`count` steps in a row; very many in two stages of about √count each.

    The bound by which dp_accounting cuts tails off suits lists about as long as the sum is wide.
    One step's list is far shorter than the sum of 10⁸ of them, and in one stage it would keep many
    times more than there is.
    """
    if count == 1:
        return distribution
    if count < MANY_STEPS:
        return distribution.self_compose(count)
    inner = math.isqrt(count)
    outer, rest = divmod(count, inner)
    composed = distribution.self_compose(inner, CUT_TAILS / outer).self_compose(outer, CUT_TAILS)
    return composed if rest == 0 else composed.compose(_self_composed(distribution, rest))


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

    if pessimistic and adjacency == "add-remove" and sampling_prob < 1.0:
        return privacy_loss_distribution.PrivacyLossDistribution(
            _connect_dots("REMOVE", noise_multiplier, sampling_prob, spacing),
            _connect_dots("ADD", noise_multiplier, sampling_prob, spacing),
        )
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


def _connect_dots(direction: str, noise: float, sampling_prob: float, spacing: float) -> Any:
    """One step's distribution as dp_accounting builds it, with all its δ(ε) computed at once.

    dp_accounting inverts the privacy loss one grid point at a time in Python, which is most of the
    cost of a long run. Here x with loss ε comes from one formula: with u = log(1 + (e^{±ε} − 1)/q),
    x = −1/2 − σ²·u for REMOVE (plus) and x = 1/2 + σ²·u for ADD (minus), in its orientation, where
    the loss falls with x.
    """
    import numpy as np
    from dp_accounting.pld import pld_pmf, privacy_loss_mechanism

    loss = privacy_loss_mechanism.GaussianPrivacyLoss(
        noise,
        sampling_prob=sampling_prob,
        adjacency_type=privacy_loss_mechanism.AdjacencyType[direction],
    )
    bounds = loss.connect_dots_bounds()
    first = math.floor(bounds.epsilon_lower / spacing)
    last = math.ceil(bounds.epsilon_upper / spacing)
    epsilons = spacing * np.arange(first, last + 1)
    sign = 1.0 if direction == "REMOVE" else -1.0
    # Beyond this ε the loss has no inverse: δ is 1 − e^ε for REMOVE and 0 for ADD.
    reached = sign * epsilons > math.log1p(-sampling_prob)
    # log(1 + (e^t − 1)/q) in the form that does not overflow for large t.
    t = sign * epsilons[reached]
    shifted = t - math.log(sampling_prob) + np.log1p(-(1.0 - sampling_prob) * np.exp(-t))
    x = -sign * (0.5 + noise**2 * shifted)
    deltas = -np.expm1(np.minimum(epsilons, 0.0)) if sign > 0.0 else np.zeros_like(epsilons)
    deltas[reached] = loss.mu_upper_cdf(x) - np.exp(epsilons[reached] + loss.mu_lower_log_cdf(x))
    return pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(
        spacing, first, last, np.clip(deltas, 0.0, 1.0)
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


def optimistic(mechanism: SampledGaussian, delta: float, width: float) -> float:
    """A lower bound of ε, at most about `width` below it unless the grid would grow too large.

    Rounding every loss down (privacy buckets) shifts the composed loss by up to T·h.
    """
    if mechanism.noise_multiplier == 0.0:
        return math.inf
    wanted = 2.0 * width / _composed(mechanism)[1]
    finest = _loss_range(mechanism) / LARGEST_OPTIMISTIC_GRID
    spacing = max(wanted, finest)
    if _composed(mechanism)[1] * spacing > LARGEST_SHIFT:
        return 0.0  # very many steps: rounding down so coarsely says nothing
    return epsilon_at(mechanism, delta, spacing, pessimistic=False)
