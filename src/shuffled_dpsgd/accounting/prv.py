"""Privacy random variables: the accountant of Gopi, Lee & Wutschitz (2021), written out.

The privacy loss Y of one step is truncated to [−L, L], moved to a mesh of spacing h with its mean
kept, and convolved T times by Fourier transform. What is returned is ε̃(δ − δ_err) + ε_err, an upper
bound of ε: each step moves the loss by a centred amount in an interval of length h, so by Hoeffding
the sum moves by more than ε_err = h·√(T/2 · ln(12/δ_err)) with probability at most δ_err/6; steps
beyond L and sums that wrap around have probability at most δ_err/4 each (`loss_tail`). Keeping the
mean is what lets the mesh be √T times coarser than rounding up would.

Legend: σ noise_multiplier, q sampling_prob, T num_steps, t a privacy loss, x an output.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from shuffled_dpsgd.accounting.rdp import loss_tail, rdp_epsilon
from shuffled_dpsgd.core.events import SampledGaussian

Array: TypeAlias = npt.NDArray[np.float64]
Cdf: TypeAlias = Callable[[Array], Array]

# A loose error target doubles the noise at small ε, so it is relative to ε, not a constant.
RELATIVE_EPSILON_ERROR = 2e-3
RELATIVE_DELTA_ERROR = 1e-3
LARGEST_MESH = 2**23


def prv_epsilon(
    mechanism: SampledGaussian, delta: float, relative_error: float = RELATIVE_EPSILON_ERROR
) -> float:
    """The upper end of the PRV accountant's interval, over both directions of add-remove."""
    if mechanism.noise_multiplier == 0.0:
        return math.inf
    wanted = max(relative_error * rdp_epsilon(mechanism, delta), 1e-7)
    delta_error = RELATIVE_DELTA_ERROR * delta
    half_width, size, epsilon_error = _mesh(mechanism, wanted, delta_error)
    noise, prob = mechanism.noise_multiplier, mechanism.sampling_prob
    directions: tuple[tuple[Cdf, float], ...] = (
        (lambda t: _cdf_remove(t, noise, prob), _mean_remove(noise, prob)),
        (lambda t: _cdf_add(t, noise, prob), _mean_add(noise, prob)),
    )
    worst = 0.0
    for cdf, mean in directions:
        losses, masses = _compose(cdf, mean, mechanism.num_steps, half_width, size)
        worst = max(worst, _epsilon_for(losses, masses, delta - delta_error))
    return worst + epsilon_error


def _mesh(
    mechanism: SampledGaussian, wanted_error: float, delta_error: float
) -> tuple[float, int, float]:
    """(L, number of mesh points, ε_err): the error follows from the mesh that was affordable."""
    steps = mechanism.num_steps
    one_step = SampledGaussian(**{**mechanism.to_json(), "num_steps": 1})
    reach = max(
        loss_tail(mechanism, delta_error / 8.0), loss_tail(one_step, delta_error / (8.0 * steps))
    )
    deviations = math.sqrt(steps / 2.0 * math.log(12.0 / delta_error))
    spacing = wanted_error / deviations
    half_width = reach + wanted_error + steps * spacing / 2.0
    size = min(2 ** math.ceil(math.log2(2.0 * half_width / spacing)), LARGEST_MESH)
    # The untruncated mean is used; the truncated one differs by less than δ_err·L over all steps.
    error = 2.0 * half_width / size * deviations + delta_error * half_width
    return half_width, size, error


def _compose(
    cdf: Cdf, mean: float, num_steps: int, half_width: float, size: int
) -> tuple[Array, Array]:
    """Losses and masses after T steps; the mesh is shifted so that one step's mean is exact."""
    spacing = 2.0 * half_width / size
    mesh = spacing * np.arange(-size // 2, size // 2, dtype=np.float64)
    edges = np.append(mesh - spacing / 2.0, mesh[-1] + spacing / 2.0)
    masses = np.maximum(np.diff(cdf(edges)), 0.0)
    masses /= masses.sum()
    shift = mean - float(mesh @ masses)
    spectrum = np.fft.rfft(np.fft.ifftshift(masses)) ** num_steps
    composed = np.fft.fftshift(np.fft.irfft(spectrum, size))
    return mesh + num_steps * shift, np.maximum(composed, 0.0)


def _epsilon_for(losses: Array, masses: Array, delta: float) -> float:
    """The smallest ε >= 0 with Σ_{t>ε} p(t)(1 − e^{ε−t}) <= delta."""
    kept = losses > 0.0
    losses, masses = losses[kept], masses[kept]
    upper = np.cumsum(masses[::-1])[::-1]
    # e^{-t} is scaled out cell by cell only where needed: losses above 700 hold no mass here.
    lower = np.cumsum((masses * np.exp(-losses))[::-1])[::-1]
    at_loss = upper - np.exp(np.minimum(losses, 700.0)) * lower
    violating = np.flatnonzero(at_loss > delta)
    first = int(violating[-1]) + 1 if violating.size else 0
    if first >= losses.size:
        return float(losses[-1])
    if upper[first] - delta <= lower[first] or lower[first] == 0.0:
        return 0.0 if first == 0 else float(losses[first])
    return max(math.log((upper[first] - delta) / lower[first]), 0.0)


def _output_at(t: Array, noise: float, prob: float) -> Array:
    """The x with log(1 − q + q·e^{(2x−1)/(2σ²)}) = t; −inf where no x has so small a loss."""
    with np.errstate(divide="ignore", invalid="ignore"):
        # log(e^t − (1 − q)) = t + log(1 − (1 − q)e^{−t}), which does not overflow.
        rest = -(1.0 - prob) * np.exp(np.minimum(-t, 700.0))
        scaled = t + np.log1p(np.maximum(rest, -1.0)) - math.log(prob)
    return noise**2 * scaled + 0.5


def _cdf_remove(t: Array, noise: float, prob: float) -> Array:
    from scipy.special import ndtr

    x = _output_at(t, noise, prob)
    return (1.0 - prob) * ndtr(x / noise) + prob * ndtr((x - 1.0) / noise)


def _cdf_add(t: Array, noise: float, prob: float) -> Array:
    from scipy.special import ndtr

    return ndtr(-_output_at(-t, noise, prob) / noise)


def _mean_remove(noise: float, prob: float) -> float:
    return _mean_loss(noise, prob, weights=(1.0 - prob, prob))


def _mean_add(noise: float, prob: float) -> float:
    return -_mean_loss(noise, prob, weights=(1.0, 0.0))


def _mean_loss(noise: float, prob: float, weights: tuple[float, float]) -> float:
    """E of the loss under a mixture of N(0, σ²) and N(1, σ²), by the trapezoid rule.

    The integrand is analytic with Gaussian decay, where that rule converges exponentially.
    """
    total = 0.0
    z = np.linspace(-14.0, 14.0, 40_001)
    density = np.exp(-0.5 * z * z)
    density /= density.sum()
    for centre, weight in zip((0.0, 1.0), weights, strict=True):
        exponent = (2.0 * (centre + noise * z) - 1.0) / (2.0 * noise**2)
        log_one_less = math.log1p(-prob) if prob < 1.0 else -math.inf
        loss = np.logaddexp(log_one_less, math.log(prob) + exponent)
        total += weight * float(density @ loss)
    return total
