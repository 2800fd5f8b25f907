"""Sums over d independent normals without drawing d of them.

The K largest of d are drawn exactly, by cumulated exponentials (Rényi's representation of uniform
order statistics). Given the smallest of them, the others are independent normals below it, so any
sum over them has a known mean and covariance; with d − K terms that each are small, it is drawn
from the normal law with these. The error is that of this last central limit step only, and it is
checked against brute force up to d = 1e6.

Legend: z a standard normal, s an exponent, m_s the mean of e^{sz} given that z is below the K-th.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from scipy.special import log_ndtr, ndtri

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
    """Jointly draw Σz and log Σe^{sz} over `dimension` independent standard normals, no s below 0.

    Exact when `dimension` is small enough to keep every value. Cost and memory grow with
    `draws * kept`, not with `dimension`.
    """
    slopes = np.asarray(exponents, dtype=np.float64)
    if dimension <= 2 * kept:
        return _reduce(rng.standard_normal((draws, dimension)), slopes)
    largest = -ndtri(_smallest_uniforms(dimension, draws, rng, kept))
    tops = _reduce(largest, slopes)
    linear, log = _draw_others(dimension - kept, largest[:, -1], slopes, rng)
    log_exponential = np.logaddexp(tops.log_exponential, log)
    return NormalSums(linear=tops.linear + linear, log_exponential=log_exponential)


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


def _draw_others(
    count: int, upper: Array, slopes: Array, rng: np.random.Generator
) -> tuple[Array, Array]:
    """Σz and log Σe^{sz} over `count` normals below `upper`, by two moments.

    Everything is relative to the mean, W_s = Σe^{sz}/(n·m_s), whose covariance is
    (m_{s+t}/(m_s·m_t) − 1)/n, so that nothing overflows.
    """
    mean_z = _tilted_mean(0.0, upper)
    log_mean = np.stack([_log_moment(float(s), upper) for s in slopes], axis=1)
    size = slopes.size + 1
    covariance = np.empty((upper.size, size, size))
    covariance[:, 0, 0] = 1.0 + upper * mean_z - mean_z**2
    for i, s in enumerate(slopes):
        tilted = _tilted_mean(float(s), upper) - mean_z
        covariance[:, 0, i + 1] = covariance[:, i + 1, 0] = tilted
        for j, t in enumerate(slopes):
            log_ratio = _log_moment(float(s + t), upper) - log_mean[:, i] - log_mean[:, j]
            covariance[:, i + 1, j + 1] = np.expm1(np.minimum(log_ratio, 600.0))
    noise = _correlated(covariance / count, rng)
    linear = count * (mean_z + noise[:, 0])
    # A relative sum below zero means that few terms carry it, and then the kept ones carry the
    # whole sum; the floor only keeps the logarithm finite.
    relative = np.maximum(1.0 + noise[:, 1:], 1e-12)
    return linear, math.log(count) + log_mean + np.log(relative)


def _correlated(covariance: Array, rng: np.random.Generator) -> Array:
    """Centred normals with these covariances, scaled to unit diagonal so that none dominates."""
    scale = np.sqrt(np.maximum(np.einsum("nii->ni", covariance), 1e-300))
    correlation = covariance / (scale[:, :, None] * scale[:, None, :])
    values, vectors = np.linalg.eigh(correlation)
    normal = rng.standard_normal(scale.shape) * np.sqrt(np.maximum(values, 0.0))
    return scale * np.einsum("nij,nj->ni", vectors, normal)


def _log_moment(s: float, upper: Array) -> Array:
    """log E[e^{sz} | z < upper]."""
    return s * s / 2.0 + log_ndtr(upper - s) - log_ndtr(upper)


def _tilted_mean(s: float, upper: Array) -> Array:
    """E[z·e^{sz} | z < upper]/E[e^{sz} | z < upper]: the mean of N(s, 1) below `upper`."""
    z = upper - s
    return s - np.exp(-0.5 * z * z - 0.5 * math.log(2.0 * math.pi) - log_ndtr(z))
