"""Gaussian DP and advanced composition, which the paper names beside its own accountant.

Offered for comparison. Advanced composition is proven but loose; the central limit theorem behind
Gaussian DP bounds ε in neither direction (over the settings of `tests/core` it gives between a
fiftieth of ε and, for σ well below 0.6, absurdly more), so it certifies nothing.

Legend: σ noise_multiplier, q sampling_prob, T num_steps.
"""

from __future__ import annotations

import math

from shuffled_dpsgd.accounting.composition import step_delta, total_epsilon
from shuffled_dpsgd.accounting.theorem import smallest_epsilon
from shuffled_dpsgd.core.events import SampledGaussian


def gdp_epsilon(mechanism: SampledGaussian, delta: float) -> float:
    """ε by the central limit theorem of Gaussian DP (Bu et al. 2020): no bound in either direction.

    The run is taken for a Gaussian mechanism with μ = q·√(T·(e^{1/σ²} − 1)).
    """
    noise = mechanism.noise_multiplier
    if noise < 0.05:
        # e^{1/σ²} overflows near 0.038; the approximation is meaningless long before.
        return math.inf
    mu = mechanism.sampling_prob * math.sqrt(mechanism.num_steps * math.expm1(noise**-2))
    return gaussian_epsilon(1.0 / mu, delta)


def gaussian_epsilon(noise_multiplier: float, delta: float) -> float:
    """The exact ε of one Gaussian release (Balle & Wang 2018), by the theorem at d = 1."""
    return smallest_epsilon(noise_multiplier, delta, dimension=1, batch_clip=1.0)


def advanced_composition_epsilon(
    mechanism: SampledGaussian, delta: float, delta_split: float = 0.5
) -> float:
    """ε by the paper's composition with d = 1: the exact Gaussian, sampled, composed (Thm. 22)."""
    if mechanism.noise_multiplier == 0.0:
        return math.inf
    inner_delta = step_delta(delta, mechanism.sampling_prob, mechanism.num_steps, delta_split)
    return total_epsilon(
        gaussian_epsilon(mechanism.noise_multiplier, inner_delta),
        delta=delta,
        sampling_prob=mechanism.sampling_prob,
        num_steps=mechanism.num_steps,
        delta_split=delta_split,
    )
