"""Mechanisms whose ε is known exactly, to hold every estimator against."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.optimize import brentq
from scipy.stats import norm

from shuffled_dpsgd.accounting import certified_claim
from shuffled_dpsgd.auditing.estimators import Inclusion, ScorePair
from shuffled_dpsgd.auditing.estimators.order_statistics import composed_epsilon


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
        epsilon=composed_epsilon(mu, sampling_prob=1.0, num_steps=1, delta=delta),
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


def geometric(epsilon: float) -> Known:
    """Discrete Laplace noise on whole numbers: many ties, tight at δ = 0."""
    stop = 1.0 - math.exp(-epsilon)

    def release(bits: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        return bits + rng.geometric(stop, bits.size) - rng.geometric(stop, bits.size)

    return Known(name=f"geometric {epsilon}", epsilon=epsilon, delta=0.0, release=release)


def uniform(delta: float) -> Known:
    """Uniform noise of width 1/δ: nothing but δ, so any positive ε at that δ is false."""
    return Known(
        name=f"uniform {delta}",
        epsilon=0.0,
        delta=delta,
        release=lambda bits, rng: bits + rng.random(bits.size) / delta,
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


def mixed_response(weak: float, strong: float) -> Known:
    """One of two randomized responses by a public coin: four scores, in order of likelihood."""
    lies = 1.0 / (1.0 + np.exp([weak, strong]))

    def release(bits: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        coin = (rng.random(bits.size) < 0.5).astype(int)
        noisy = np.where(rng.random(bits.size) < lies[coin], 1.0 - bits, bits)
        return (2.0 * noisy - 1.0) * (1.0 + coin)

    return Known(name=f"mixture {weak}, {strong}", epsilon=strong, delta=0.0, release=release)


def sampled_gaussian(mu: float, sampling_prob: float, delta: float) -> Known:
    """One Poisson-sampled Gaussian step; ε from the two closed forms of its δ(ε)."""

    def excess(epsilon: float) -> float:
        """δ(ε) − δ of the larger direction, both events read off the monotone likelihood ratio."""
        reached = math.expm1(epsilon) / sampling_prob + 1.0
        at = math.log(reached) / mu + mu / 2.0
        mixed = sampling_prob * norm.sf(at - mu) + (1.0 - sampling_prob) * norm.sf(at)
        present = mixed - math.exp(epsilon) * norm.sf(at)
        absent = 0.0
        reached = (math.exp(-epsilon) - 1.0) / sampling_prob + 1.0
        if reached > 0.0:
            at = math.log(reached) / mu + mu / 2.0
            mixed = sampling_prob * norm.cdf(at - mu) + (1.0 - sampling_prob) * norm.cdf(at)
            absent = norm.cdf(at) - math.exp(epsilon) * mixed
        return max(present, absent) - delta

    return Known(
        name=f"sampled gaussian mu={mu} q={sampling_prob}",
        epsilon=brentq(excess, 0.0, 60.0),
        delta=delta,
        release=lambda bits, rng: (
            bits * mu * (rng.random(bits.size) < sampling_prob) + rng.standard_normal(bits.size)
        ),
    )


def sampled_run(sigma: float, sampling_prob: float, num_steps: int, delta: float) -> Known:
    """Many sampled Gaussian steps; a release is what one step shows of a canary that joined it."""
    run = {"noise_multiplier": sigma, "sampling_prob": sampling_prob, "num_steps": num_steps}
    return Known(
        name=f"{num_steps} steps at sigma={sigma} q={sampling_prob}",
        epsilon=float(certified_claim(**run, delta=delta).epsilon),
        delta=delta,
        release=lambda bits, rng: bits + sigma * rng.standard_normal(bits.size),
    )


def nothing() -> Known:
    """Both worlds the same, rounded to tenths so that scores tie."""
    return Known(
        name="nothing",
        epsilon=0.0,
        delta=0.0,
        release=lambda bits, rng: np.round(rng.standard_normal(bits.size), 1),
    )
