"""Sums over d independent normals without drawing d of them.

The K largest of d are drawn exactly, by cumulated exponentials (Rényi's representation of uniform
order statistics); where wanted the K smallest as well. Given those, the others are independent
normals truncated to the gap, so any sum over them has a known mean and covariance; with d − K terms
that each are small, it is drawn from the normal law with these. The error is that of this last
central limit step only, and it is checked against brute force up to d = 1e6.

Legend: z a standard normal, s an exponent, m_s the conditional mean of e^{sz} in the gap.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[np.float64]

KEPT = 256


@dataclass(frozen=True, kw_only=True)
class NormalSums:
    """For each draw: Σz over all d normals, and log Σe^{sz} for each exponent s (one column)."""

    linear: Array
    log_exponential: Array


def draw_sums(
    dimension: int,
    exponents: Sequence[float],
    draws: int,
    rng: np.random.Generator,
    kept: int = KEPT,
) -> NormalSums:
    """Jointly draw Σz and log Σe^{sz} over `dimension` independent standard normals.

    Exact when `dimension` is small enough to keep every value. Cost and memory grow with
    `draws * kept`, not with `dimension`.
    """
    slopes = np.asarray(exponents, dtype=np.float64)
    if dimension <= 2 * kept:
        return _reduce(rng.standard_normal((draws, dimension)), slopes)
    both = bool(np.any(slopes > 0.0) and np.any(slopes < 0.0))
    flip = bool(np.any(slopes < 0.0)) and not both
    sums = _draw_tails(dimension, -slopes if flip else slopes, draws, rng, kept, both)
    return NormalSums(linear=-sums.linear, log_exponential=sums.log_exponential) if flip else sums


def _draw_tails(
    dimension: int,
    slopes: Array,
    draws: int,
    rng: np.random.Generator,
    kept: int,
    both: bool,
) -> NormalSums:
    """Exact upper (and lower) tail, then the gap between them by its first two moments."""
    top_tail = _smallest_uniforms(dimension, draws, rng, kept)
    extremes = -_ndtri(top_tail)
    upper = extremes[:, -1]
    rest, lower = dimension - kept, np.full(draws, -np.inf)
    if both:
        # The others are uniform between the kept tail and one; draw their far end the same way.
        share = _smallest_uniforms(rest, draws, rng, kept)
        bottom = _ndtri(share * (1.0 - top_tail[:, -1:]))
        extremes = np.concatenate([extremes, bottom], axis=1)
        rest, lower = rest - kept, bottom[:, -1]
    kept_sums = _reduce(extremes, slopes)
    gap_linear, gap_log = _draw_gap(rest, lower, upper, slopes, rng)
    return NormalSums(
        linear=kept_sums.linear + gap_linear,
        log_exponential=np.logaddexp(kept_sums.log_exponential, gap_log),
    )


def _smallest_uniforms(count: int, draws: int, rng: np.random.Generator, kept: int) -> Array:
    """The `kept` smallest of `count` uniforms, ascending, one row a draw."""
    cumulated = np.cumsum(rng.standard_exponential((draws, kept)), axis=1)
    total = cumulated[:, -1] + rng.standard_gamma(count + 1 - kept, draws)
    return cumulated / total[:, None]


def _reduce(values: Array, slopes: Array) -> NormalSums:
    columns = []
    for slope in slopes:
        scaled = slope * values
        peak = scaled.max(axis=1)
        columns.append(peak + np.log(np.exp(scaled - peak[:, None]).sum(axis=1)))
    return NormalSums(linear=values.sum(axis=1), log_exponential=np.stack(columns, axis=1))


def _draw_gap(
    count: int, lower: Array, upper: Array, slopes: Array, rng: np.random.Generator
) -> tuple[Array, Array]:
    """Σz and log Σe^{sz} over `count` normals truncated to [lower, upper], by two moments.

    Everything is relative to the mean, W_s = Σe^{sz}/(n·m_s), whose covariance is
    (m_{s+t}/(m_s·m_t) − 1)/n, so that nothing overflows.
    """
    mean_z = _tilted_mean(0.0, lower, upper)
    log_mean = np.stack([_log_moment(float(s), lower, upper) for s in slopes], axis=1)
    size = slopes.size + 1
    covariance = np.empty((lower.size, size, size))
    covariance[:, 0, 0] = _variance(lower, upper)
    for i, s in enumerate(slopes):
        tilted = _tilted_mean(float(s), lower, upper) - mean_z
        covariance[:, 0, i + 1] = covariance[:, i + 1, 0] = tilted
        for j, t in enumerate(slopes):
            log_ratio = _log_moment(float(s + t), lower, upper) - log_mean[:, i] - log_mean[:, j]
            covariance[:, i + 1, j + 1] = np.expm1(np.minimum(log_ratio, 600.0))
    noise = _correlated(covariance / count, rng)
    linear = count * (mean_z + noise[:, 0])
    # A relative sum below zero means that few terms carry the gap, and then the kept ones carry
    # the whole sum; the floor only keeps the logarithm finite.
    relative = np.maximum(1.0 + noise[:, 1:], 1e-12)
    return linear, math.log(count) + log_mean + np.log(relative)


def _correlated(covariance: Array, rng: np.random.Generator) -> Array:
    """Centred normals with these covariances, scaled to unit diagonal so that none dominates."""
    scale = np.sqrt(np.maximum(np.einsum("nii->ni", covariance), 1e-300))
    correlation = covariance / (scale[:, :, None] * scale[:, None, :])
    values, vectors = np.linalg.eigh(correlation)
    normal = rng.standard_normal(scale.shape) * np.sqrt(np.maximum(values, 0.0))
    return scale * np.einsum("nij,nj->ni", vectors, normal)


def _log_moment(s: float, lower: Array, upper: Array) -> Array:
    """log E[e^{sz} | lower < z < upper]."""
    return s * s / 2.0 + _log_mass(lower - s, upper - s) - _log_mass(lower, upper)


def _tilted_mean(s: float, lower: Array, upper: Array) -> Array:
    """E[z·e^{sz} | gap]/E[e^{sz} | gap]: the mean of N(s, 1) truncated to the gap."""
    log_mass = _log_mass(lower - s, upper - s)
    return s + np.exp(_log_pdf(lower - s) - log_mass) - np.exp(_log_pdf(upper - s) - log_mass)


def _variance(lower: Array, upper: Array) -> Array:
    log_mass = _log_mass(lower, upper)
    low, high = np.exp(_log_pdf(lower) - log_mass), np.exp(_log_pdf(upper) - log_mass)
    ends = np.where(np.isfinite(lower), lower, 0.0) * low - upper * high
    return 1.0 + ends - (low - high) ** 2


def _log_mass(lower: Array, upper: Array) -> Array:
    from scipy.special import log_ndtr

    high, low = log_ndtr(upper), log_ndtr(lower)
    return high + np.log1p(-np.exp(low - high))


def _log_pdf(z: Array) -> Array:
    return -0.5 * z * z - 0.5 * math.log(2.0 * math.pi)


def _ndtri(probability: Array) -> Array:
    from scipy.special import ndtri

    return ndtri(probability)
