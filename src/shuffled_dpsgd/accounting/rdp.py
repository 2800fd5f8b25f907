"""Rényi differential privacy of the Poisson-sampled Gaussian, with orders that reach far enough.

Proven, and looser than the certified ε: by 1 % to 14-fold over the settings of `tests/core`, 8 % in
the median. It loses most where few steps at a small sampling rate decide.

Legend: σ noise_multiplier, q sampling_prob, T num_steps, α order, D_α Rényi divergence.
"""

from __future__ import annotations

import logging
import math
from functools import lru_cache
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from shuffled_dpsgd.core.events import SampledGaussian

Array: TypeAlias = npt.NDArray[np.float64]

# Orders that stop at 63 miss the optimum for strong privacy: about 130 at ε = 0.1, 900 at 0.01.
FRACTIONAL_ORDERS = tuple(1.0 + step / 20.0 for step in range(1, 20)) + tuple(
    2.0 + step / 5.0 for step in range(1, 40) if step % 5
)
WHOLE_ORDERS = tuple(sorted({*range(2, 129), *np.geomspace(128, 30_000, 60).astype(int).tolist()}))


def rdp_epsilon(mechanism: SampledGaussian, delta: float) -> float:
    """ε by Rényi DP (Mironov, Talwar & Zhang 2019; conversion of Canonne et al. 2020)."""
    from dp_accounting.rdp import rdp_privacy_accountant

    if mechanism.noise_multiplier == 0.0:
        return math.inf
    orders, divergences = _divergences(mechanism.noise_multiplier, mechanism.sampling_prob)
    epsilon, _ = rdp_privacy_accountant.compute_epsilon(
        orders, mechanism.num_steps * divergences, delta
    )
    return float(epsilon)


@lru_cache(maxsize=64)
def _divergences(noise: float, sampling_prob: float) -> tuple[Array, Array]:
    """(orders, D_α of one step)."""
    import dp_accounting
    from dp_accounting.rdp import rdp_privacy_accountant

    accountant = rdp_privacy_accountant.RdpAccountant(FRACTIONAL_ORDERS)
    gaussian = dp_accounting.GaussianDpEvent(noise)
    # It says of every order for which its series does not converge that it leaves it out. That is
    # sound, for the minimum over fewer orders is larger; the whole orders below always converge.
    log = logging.getLogger("absl")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        accountant.compose(dp_accounting.PoissonSampledDpEvent(sampling_prob, gaussian))
    finally:
        log.setLevel(level)
    whole = np.array(WHOLE_ORDERS, dtype=np.float64)
    moments = np.array([_log_moment(order, noise, sampling_prob) for order in WHOLE_ORDERS])
    orders = np.concatenate([FRACTIONAL_ORDERS, whole])
    return orders, np.concatenate([accountant.rdp, moments / (whole - 1.0)])


def _log_moment(order: int, noise: float, sampling_prob: float) -> float:
    """log E_Q[(P/Q)^α] for a whole α: a binomial sum of Gaussian moments, exact."""
    from scipy.special import gammaln, logsumexp

    if sampling_prob == 1.0:
        return order * (order - 1) / (2.0 * noise**2)
    k: Array = np.arange(order + 1, dtype=np.float64)
    binomial = gammaln(order + 1.0) - gammaln(k + 1.0) - gammaln(order - k + 1.0)
    weights = binomial + k * math.log(sampling_prob) + (order - k) * math.log1p(-sampling_prob)
    return max(float(logsumexp(weights + k * (k - 1.0) / (2.0 * noise**2))), 0.0)
