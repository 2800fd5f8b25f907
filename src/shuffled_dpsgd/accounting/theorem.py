"""Theorem 3 of the paper as printed, evaluated in log space.

The formula approximates a *lower* bound of δ, so satisfying it proves nothing for d > 1
(docs/claims.md). At d = 1 it is the exact Gaussian mechanism (Balle & Wang 2018).

Legend, in units of c = 1: d dimension, c' batch_clip, σ noise_multiplier,
x1 = d·c'/((d−1)σ²), x2 = d·(1+c')/((d−1)σ²);
ζ1 = −log(1+(d−1)e^{−x1}), ζ2 = −log(1+(d−1)e^{−x2}) − 1/σ²;
v_i = σ_Zi² = log( (1+(d−1)e^{−2x_i})/(1+(d−1)e^{−x_i})² · (e^{1/σ²}−1) + 1 ).
"""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from shuffled_dpsgd.accounting.calibration import LARGEST_SIGMA, SMALLEST_SIGMA, unreachable
from shuffled_dpsgd.errors import InvalidArgumentError, require

Array: TypeAlias = npt.NDArray[np.float64]

SCAN_POINTS = 6000
LARGEST_DIMENSION = 10**12


def log_delta(
    epsilon: npt.ArrayLike, noise_multiplier: npt.ArrayLike, *, dimension: int, batch_clip: float
) -> Array:
    """log δ(ε) of the theorem, elementwise; −inf where the formula gives zero or less."""
    from scipy.special import log_ndtr

    eps = np.asarray(epsilon, dtype=np.float64)
    sigma = np.asarray(noise_multiplier, dtype=np.float64)
    zeta1, spread1 = _moments(sigma, dimension, batch_clip)
    zeta2, spread2 = _moments(sigma, dimension, 1.0 + batch_clip)
    zeta2 = zeta2 - 1.0 / sigma**2
    with np.errstate(divide="ignore", over="ignore"):
        first = log_ndtr(spread1 / 2.0 + (zeta1 - eps) / spread1)
        second = eps + log_ndtr(spread2 / 2.0 + (zeta2 - eps) / spread2)
    return _log_difference(first, second)


def theorem_delta(
    epsilon: float, noise_multiplier: float, *, dimension: int, batch_clip: float
) -> float:
    """δ(ε) of the theorem as a number; 0 where it underflows or the formula goes negative.

    >>> theorem_delta(1.0, 1.0, dimension=1, batch_clip=1.0) > 0.12
    True
    """
    check_theorem(dimension, batch_clip)
    value = log_delta(epsilon, noise_multiplier, dimension=dimension, batch_clip=batch_clip)
    return float(np.exp(value))


def smallest_sigma(epsilon: float, delta: float, *, dimension: int, batch_clip: float) -> float:
    """The smallest σ above which the theorem's δ stays at or below `delta`.

    As a function of σ the formula need not be monotone, so the whole supported range is scanned
    from above and only then is the last crossing bisected.
    """
    check_theorem(dimension, batch_clip)
    grid = np.geomspace(SMALLEST_SIGMA, LARGEST_SIGMA, SCAN_POINTS)
    target = math.log(delta)

    def excess(sigma: Any) -> Any:
        return log_delta(epsilon, sigma, dimension=dimension, batch_clip=batch_clip) - target

    violated = np.flatnonzero(excess(grid) > 0.0)
    if violated.size == 0:
        raise unreachable(epsilon, too_strict=False)
    last = int(violated[-1])
    if last == SCAN_POINTS - 1:
        raise unreachable(epsilon, too_strict=True)
    return _last_crossing(excess, float(grid[last]), float(grid[last + 1]))


def smallest_epsilon(
    noise_multiplier: float, delta: float, *, dimension: int, batch_clip: float
) -> float:
    """The smallest ε above which the theorem's δ stays at or below `delta`; 0 if it always does."""
    check_theorem(dimension, batch_clip)
    target = math.log(delta)
    # The exact Gaussian's ε at a millionth of delta is far above any crossing of either term.
    ceiling = 0.5 / noise_multiplier**2 + 40.0 / noise_multiplier + 1.0
    grid = np.concatenate([[0.0], np.geomspace(1e-12 * ceiling, ceiling, SCAN_POINTS)])

    def excess(epsilon: Any) -> Any:
        value = log_delta(epsilon, noise_multiplier, dimension=dimension, batch_clip=batch_clip)
        return value - target

    violated = np.flatnonzero(excess(grid) > 0.0)
    if violated.size == 0:
        return 0.0
    last = int(violated[-1])
    expected = "a delta that some finite epsilon reaches in float64"
    require(last != grid.size - 1, "delta", expected, delta, "raise delta or the noise multiplier")
    return _last_crossing(excess, float(grid[last]), float(grid[last + 1]))


def gaussian_epsilon(noise_multiplier: float, delta: float) -> float:
    """The exact ε of one Gaussian release (Balle & Wang 2018), by the theorem at d = 1.

    >>> round(gaussian_epsilon(1.0, 1e-5), 3)
    4.377
    """
    if delta == 0.0:
        return math.inf
    return smallest_epsilon(noise_multiplier, delta, dimension=1, batch_clip=1.0)


def check_theorem(dimension: int, batch_clip: float) -> None:
    """Refuse a dimension or a batch clip the theorem does not speak about."""
    if dimension != int(dimension) or not 1 <= dimension <= LARGEST_DIMENSION:
        raise InvalidArgumentError(
            "dimension",
            expected=f"a whole number of shuffled coordinates from 1 to {LARGEST_DIMENSION:g}",
            got=dimension,
            remedy="count the parameters a permutation moves",
        )
    expected = "a positive ratio c'/c of batch clip to per-example clip"
    remedy = "the paper's text implies 1; it decides the outcome, so it has no default"
    require(
        math.isfinite(batch_clip) and batch_clip > 0.0, "batch_clip", expected, batch_clip, remedy
    )


def _moments(sigma: Array, dimension: int, reach: float) -> tuple[Array, Array]:
    """(ζ, σ_Z) for x = d·reach/((d−1)σ²); the −1/σ² of ζ2 is left to the caller."""
    if dimension == 1:
        return np.zeros_like(sigma), 1.0 / sigma
    inverse = 1.0 / sigma**2
    x = dimension / (dimension - 1) * reach * inverse
    others = math.log(dimension - 1)
    log_sum = np.logaddexp(0.0, others - x)
    log_square_sum = np.logaddexp(0.0, others - 2.0 * x)
    # log(e^u − 1) = u + log(1 − e^{−u}) neither overflows nor cancels.
    log_growth = inverse + np.log(-np.expm1(-inverse))
    variance = np.logaddexp(0.0, log_square_sum - 2.0 * log_sum + log_growth)
    return -log_sum, np.sqrt(variance)


def _log_difference(first: Array, second: Array) -> Array:
    """log(e^first − e^second), −inf where the difference is not positive."""
    gap = second - first
    positive = gap < 0.0
    safe = np.where(positive, gap, -1.0)
    return np.where(positive, first + np.log(-np.expm1(safe)), -np.inf)


def _last_crossing(excess: Any, violating: float, satisfying: float) -> float:
    """Bisect down to neighbouring floats, or nearly; returns the satisfying end."""
    for _ in range(200):
        middle = 0.5 * (violating + satisfying)
        if not min(violating, satisfying) < middle < max(violating, satisfying):
            break
        if satisfying - violating <= 1e-13 * satisfying:
            break
        if excess(middle) > 0.0:
            violating = middle
        else:
            satisfying = middle
    return satisfying
