"""The law of log Σ_j e^{Y_j}, Y_j ~ N(0, std²), by five methods (the paper's Lemma 1, Fig. 2).

A method takes the number of terms, their std and a sorted sample of the logarithm, and returns the
logarithm's CDF. Fenton–Wilkinson is what the paper's theorem uses. The sample is drawn by order
statistics, in well under a second at d = 1e8 where the paper's brute force took an hour.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from scipy.special import ndtr, ndtri

from shuffled_dpsgd_experiments.examination.order_statistics import draw_sums

Array: TypeAlias = npt.NDArray[np.float64]
Cdf: TypeAlias = Callable[[Array], Array]
Moments: TypeAlias = tuple[float, float]

KEPT = 512
CHUNK = 1000
EXACT_ADDITIONS = 500


def draw_log(dimension: int, std: float, draws: int, seed: int) -> Array:
    """Sorted independent values of the logarithm, drawn in chunks that bound the memory."""
    rng = np.random.default_rng(seed)
    parts = [
        draw_sums(dimension, [std], min(CHUNK, draws - start), rng, kept=KEPT).log_exponential[:, 0]
        for start in range(0, draws, CHUNK)
    ]
    return np.sort(np.concatenate(parts))


def fenton_wilkinson(dimension: int, std: float, sample: Array) -> Cdf:
    """Normal with the first two moments of the sum matched (Fenton 1960; Lemma 1 of the paper)."""
    spread = math.log1p(math.expm1(std**2) / dimension)
    return _normal(math.log(dimension) + (std**2 - spread) / 2.0, math.sqrt(spread))


def schwartz_yeh(dimension: int, std: float, sample: Array) -> Cdf:
    """Normal with the logarithm's first two moments, a term at a time (Schwartz & Yeh 1982).

    Each addition takes the sum so far for log-normal, which is the method's own error. Beyond
    `EXACT_ADDITIONS` terms the recursion moves slowly and is followed by the midpoint rule in
    strides of a hundredth of the terms so far: 1,200 strides reach d = 1e8.
    """
    term, state, count = (0.0, std**2), (0.0, std**2), 1
    while count < dimension:
        stride = 1 if count < EXACT_ADDITIONS else math.ceil(count / 100)
        stride = min(stride, dimension - count)
        state = _add_many(state, term, stride)
        count += stride
    return _normal(state[0], math.sqrt(state[1]))


def least_squares(dimension: int, std: float, sample: Array) -> Cdf:
    """Normal whose quantiles fit the sample's by least squares (Zhao & Ding 2007, linear)."""
    quantiles = ndtri((np.arange(sample.size) + 0.5) / sample.size)
    slope = float(quantiles @ (sample - sample.mean()) / (quantiles @ quantiles))
    return _normal(float(sample.mean()), slope)


def kernel_density(dimension: int, std: float, sample: Array) -> Cdf:
    """Gaussian kernels on the sample, Silverman's bandwidth."""
    low, high = np.quantile(sample, [0.25, 0.75])
    width = 0.9 * min(float(sample.std()), float(high - low) / 1.349) * sample.size**-0.2
    return lambda at: ndtr((at[:, None] - sample) / width).mean(axis=1)


def monte_carlo(dimension: int, std: float, sample: Array) -> Cdf:
    """The sample's own CDF: the ground truth, up to sampling error."""
    return lambda at: np.searchsorted(sample, at, side="right") / sample.size


METHODS: dict[str, Callable[[int, float, Array], Cdf]] = {
    "fenton-wilkinson": fenton_wilkinson,
    "schwartz-yeh": schwartz_yeh,
    "least-squares": least_squares,
    "kernel-density": kernel_density,
    "monte-carlo": monte_carlo,
}


def _normal(mean: float, std: float) -> Cdf:
    return lambda at: ndtr((at - mean) / std)


def _add_many(state: Moments, term: Moments, stride: int) -> Moments:
    """`stride` additions of `term`: one exactly, more by the midpoint rule."""
    after = _add_lognormals(state, term)
    if stride == 1:
        return after
    middle = _moved(state, state, after, stride / 2.0)
    return _moved(state, middle, _add_lognormals(middle, term), stride)


def _moved(state: Moments, start: Moments, end: Moments, times: float) -> Moments:
    return state[0] + times * (end[0] - start[0]), state[1] + times * (end[1] - start[1])


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
