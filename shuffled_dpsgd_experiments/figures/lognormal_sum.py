"""The law of log Σ_j e^{Y_j}, by the five methods the paper compares (Lemma 1, Fig. 2).

One signature: a method takes a `LognormalSum` and returns the CDF of its logarithm.
Fenton–Wilkinson is what the paper's theorem uses; Monte-Carlo is the ground truth, drawn by order
statistics in well under a second at d = 1e8 where the paper's brute force took an hour.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
from scipy.special import ndtr, ndtri

from shuffled_dpsgd.accounting.order_statistics import draw_sums
from shuffled_dpsgd.errors import InvalidArgumentError

Array: TypeAlias = npt.NDArray[np.float64]
Cdf: TypeAlias = Callable[[npt.ArrayLike], Array]
Moments: TypeAlias = tuple[float, float]

KEPT = 512
CHUNK = 1000
EXACT_ADDITIONS = 500


@dataclass(frozen=True, kw_only=True)
class LognormalSum:
    """S = e^{Y_1 + spike} + Σ_{j=2}^{d} e^{Y_j} with independent Y_j ~ N(0, std²).

    `spike` is the amount by which one term's mean exceeds the others', as for the theorem's pair;
    0 makes the terms identically distributed.
    """

    dimension: int
    std: float
    spike: float = 0.0

    def __post_init__(self) -> None:
        if self.dimension != int(self.dimension) or self.dimension < 1:
            raise InvalidArgumentError(
                "dimension", expected="a whole number >= 1", got=self.dimension
            )
        if not (math.isfinite(self.std) and self.std > 0.0):
            raise InvalidArgumentError("std", expected="a positive number", got=self.std)

    def draw_log(self, draws: int, rng: np.random.Generator) -> Array:
        """`draws` independent values of log S, in chunks that bound the memory."""
        first = self.spike + self.std * rng.standard_normal(draws)
        if self.dimension == 1:
            return first
        others = [
            draw_sums(
                self.dimension - 1, [self.std], min(CHUNK, draws - start), rng, kept=KEPT
            ).log_exponential[:, 0]
            for start in range(0, draws, CHUNK)
        ]
        return np.logaddexp(first, np.concatenate(others))


class Method(Protocol):
    """An approximation of the law of log S; `draws` and `seed` matter to sampling methods only."""

    def __call__(self, total: LognormalSum, *, draws: int = 1000, seed: int = 0) -> Cdf: ...


def fenton_wilkinson(total: LognormalSum, *, draws: int = 1000, seed: int = 0) -> Cdf:
    """Normal with the first two moments of S matched (Fenton 1960; Lemma 1 of the paper)."""
    variance = total.std**2
    others = math.log(total.dimension - 1) if total.dimension > 1 else -math.inf
    log_sum = float(np.logaddexp(total.spike, others))
    log_squares = float(np.logaddexp(2.0 * total.spike, others))
    log_growth = variance + math.log(-math.expm1(-variance))
    spread = float(np.logaddexp(0.0, log_squares - 2.0 * log_sum + log_growth))
    return _normal_cdf(log_sum + variance / 2.0 - spread / 2.0, math.sqrt(spread))


def schwartz_yeh(total: LognormalSum, *, draws: int = 1000, seed: int = 0) -> Cdf:
    """Normal with the first two moments of log S, one term added at a time (Schwartz & Yeh 1982).

    Each addition takes the sum so far for log-normal, which is the method's own error. Beyond
    `EXACT_ADDITIONS` terms the recursion moves slowly and is followed by the midpoint rule in
    strides of a hundredth of the terms so far: 1,200 strides reach d = 1e8.
    """
    term = (0.0, total.std**2)
    state, count = (total.spike, total.std**2), 1
    while count < total.dimension:
        stride = 1 if count < EXACT_ADDITIONS else math.ceil(count / 100)
        stride = min(stride, total.dimension - count)
        state = _add_many(state, term, stride)
        count += stride
    return _normal_cdf(state[0], math.sqrt(state[1]))


def least_squares(total: LognormalSum, *, draws: int = 1000, seed: int = 0) -> Cdf:
    """Normal whose quantiles fit those of a sample by least squares (Zhao & Ding 2007, linear)."""
    sample = np.sort(total.draw_log(draws, np.random.default_rng(seed)))
    quantiles = ndtri((np.arange(draws) + 0.5) / draws)
    slope = float(quantiles @ (sample - sample.mean()) / (quantiles @ quantiles))
    return _normal_cdf(float(sample.mean()), slope)


def kernel_density(total: LognormalSum, *, draws: int = 1000, seed: int = 0) -> Cdf:
    """Gaussian kernels on a sample of log S, Silverman's bandwidth."""
    sample = total.draw_log(draws, np.random.default_rng(seed))
    low, high = np.quantile(sample, [0.25, 0.75])
    width = 0.9 * min(float(sample.std()), float(high - low) / 1.349) * draws**-0.2

    def cdf(at: npt.ArrayLike) -> Array:
        points = np.atleast_1d(np.asarray(at, dtype=np.float64))
        return ndtr((points[:, None] - sample[None, :]) / width).mean(axis=1)

    return cdf


def monte_carlo(total: LognormalSum, *, draws: int = 1000, seed: int = 0) -> Cdf:
    """The empirical CDF of draws of log S: the ground truth, up to sampling error."""
    sample = np.sort(total.draw_log(draws, np.random.default_rng(seed)))

    def cdf(at: npt.ArrayLike) -> Array:
        points = np.atleast_1d(np.asarray(at, dtype=np.float64))
        return np.searchsorted(sample, points, side="right") / draws

    return cdf


METHODS: dict[str, Method] = {
    "fenton-wilkinson": fenton_wilkinson,
    "schwartz-yeh": schwartz_yeh,
    "least-squares": least_squares,
    "kernel-density": kernel_density,
    "monte-carlo": monte_carlo,
}


def _normal_cdf(mean: float, std: float) -> Cdf:
    def cdf(at: npt.ArrayLike) -> Array:
        return ndtr((np.atleast_1d(np.asarray(at, dtype=np.float64)) - mean) / std)

    return cdf


def _add_many(state: Moments, term: Moments, stride: int) -> Moments:
    """`stride` additions of `term`: one exactly, more by the midpoint rule."""
    after = _add_lognormals(state, term)
    if stride == 1:
        return after
    half = stride / 2.0
    middle = (
        state[0] + half * (after[0] - state[0]),
        state[1] + half * (after[1] - state[1]),
    )
    beyond = _add_lognormals(middle, term)
    return (
        state[0] + stride * (beyond[0] - middle[0]),
        state[1] + stride * (beyond[1] - middle[1]),
    )


def _add_lognormals(a: Moments, b: Moments) -> Moments:
    """Mean and variance of log(e^A + e^B), A and B independent normals given as (mean, variance).

    log(e^A + e^B) = A + g(w) with w = B − A and g(w) = log(1 + e^w); Stein's lemma gives
    Cov(A, g(w)) = −Var(A)·E[g'(w)].
    """
    nodes, weights = _quadrature()
    w = (b[0] - a[0]) + math.sqrt(a[1] + b[1]) * nodes
    gain = np.logaddexp(0.0, w)
    mean_gain = float(weights @ gain)
    variance_gain = float(weights @ (gain - mean_gain) ** 2)
    slope = float(weights @ np.exp(-np.logaddexp(0.0, -w)))
    return a[0] + mean_gain, a[1] + variance_gain - 2.0 * a[1] * slope


@cache
def _quadrature() -> tuple[Array, Array]:
    """Nodes and weights of the standard normal: a fine trapezoid, as w may sit far in one tail."""
    nodes = np.linspace(-12.0, 12.0, 401)
    weights = np.exp(-0.5 * nodes * nodes)
    return nodes, weights / weights.sum()
