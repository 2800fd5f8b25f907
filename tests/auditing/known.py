"""Mechanisms whose ε is known exactly, to hold every estimator against."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from shuffled_dpsgd.auditing.estimators import Inclusion, ScorePair, gaussian_epsilon


@dataclass(frozen=True, kw_only=True)
class Known:
    """`release(bits, rng)` perturbs each bit by itself; its two worlds are (`epsilon`, `delta`)."""

    name: str
    epsilon: float
    delta: float
    release: Callable[[np.ndarray, np.random.Generator], np.ndarray]

    def scores(self, rng: np.random.Generator, count: int) -> ScorePair:
        return ScorePair(
            out=self.release(np.zeros(count), rng), present=self.release(np.ones(count), rng)
        )

    def inclusion(self, rng: np.random.Generator, count: int) -> Inclusion:
        included = rng.random(count) < 0.5
        return Inclusion(scores=self.release(included.astype(float), rng), included=included)


def gaussian(mu: float, delta: float) -> Known:
    return Known(
        name=f"gaussian mu={mu}",
        epsilon=gaussian_epsilon(mu, delta),
        delta=delta,
        release=lambda bits, rng: bits * mu + rng.standard_normal(bits.size),
    )


def laplace(epsilon: float) -> Known:
    return Known(
        name=f"laplace {epsilon}",
        epsilon=epsilon,
        delta=0.0,
        release=lambda bits, rng: bits + rng.laplace(scale=1.0 / epsilon, size=bits.size),
    )


def randomized_response(epsilon: float) -> Known:
    lie = 1.0 / (1.0 + math.exp(epsilon))
    return Known(
        name=f"randomized response {epsilon}",
        epsilon=epsilon,
        delta=0.0,
        release=lambda bits, rng: np.where(rng.random(bits.size) < lie, 1.0 - bits, bits),
    )


def leaky_response(epsilon: float, delta: float) -> Known:
    """Reveals the bit outright with probability δ, else randomized response: tight at (ε, δ)."""
    lie = 1.0 / (1.0 + math.exp(epsilon))

    def release(bits: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        noisy = np.where(rng.random(bits.size) < lie, 1.0 - bits, bits)
        return np.where(rng.random(bits.size) < delta, 3.0 * bits - 1.0, noisy)

    return Known(name=f"leaky {epsilon}", epsilon=epsilon, delta=delta, release=release)
