"""Rényi and Gaussian DP against the libraries, the draws and the formulas they come from."""

from __future__ import annotations

import math

import mpmath
import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.rdp import RdpAccountant

from shuffled_dpsgd.accounting import SampledGaussian, certified_claim
from shuffled_dpsgd.accounting.accountants import advanced_composition_epsilon, gdp_epsilon
from shuffled_dpsgd.accounting.rdp import (
    FRACTIONAL_ORDERS,
    ORDERS,
    ROUNDING,
    WHOLE_ORDERS,
    divergences,
    rdp_epsilon,
)
from shuffled_dpsgd.accounting.theorem import gaussian_epsilon, theorem_delta
from slow_cases import one_in

RUNS = [
    SampledGaussian(noise_multiplier=noise, sampling_prob=prob, num_steps=steps)
    for noise, prob, steps in [
        (0.5, 0.01, 20),
        (1.0, 0.05, 300),
        (2.0, 0.2, 50),
        (15.0, 0.02, 500),
        (1.5, 1.0, 3),
    ]
]
every_run = pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run.noise_multiplier:g}")


@every_run
def test_renyi_moments_are_dp_accountings(run: SampledGaussian) -> None:
    orders = [*FRACTIONAL_ORDERS, *(order for order in WHOLE_ORDERS if order < 500)]
    theirs = RdpAccountant(orders)
    event = GaussianDpEvent(run.noise_multiplier)
    theirs.compose(PoissonSampledDpEvent(run.sampling_prob, event), run.num_steps)
    assert rdp_epsilon(run, 1e-5) == pytest.approx(theirs.get_epsilon(1e-5), rel=1e-6)


def test_gaussian_dp_bounds_epsilon_in_neither_direction() -> None:
    """Too small with few records in much noise, too large with little noise."""
    for noise, prob, steps, above in [(1.0, 0.01, 1, False), (0.2, 1e-3, 1000, True)]:
        run = SampledGaussian(noise_multiplier=noise, sampling_prob=prob, num_steps=steps)
        certified = certified_claim(**run.to_json(), delta=1e-6).epsilon
        assert (gdp_epsilon(run, 1e-6) > 1.5 * certified) == above
        assert (gdp_epsilon(run, 1e-6) < certified / 1.5) != above


def test_gaussian_dp_is_exact_for_one_full_batch_in_the_limit() -> None:
    run = SampledGaussian(noise_multiplier=30.0, sampling_prob=1.0, num_steps=1)
    assert gdp_epsilon(run, 1e-5) == pytest.approx(gaussian_epsilon(30.0, 1e-5), rel=1e-3)
    tiny = SampledGaussian(noise_multiplier=0.01, sampling_prob=0.1, num_steps=1)
    assert gdp_epsilon(tiny, 1e-5) == math.inf


def test_the_gaussian_epsilon_meets_its_delta() -> None:
    epsilon = gaussian_epsilon(1.3, 1e-6)
    assert theorem_delta(epsilon, 1.3, dimension=1, batch_clip=1.0) == pytest.approx(1e-6, rel=1e-9)


def test_advanced_composition_of_one_full_batch_only_pays_for_the_split() -> None:
    run = SampledGaussian(noise_multiplier=2.0, sampling_prob=1.0, num_steps=1)
    assert advanced_composition_epsilon(run, 1e-5) == pytest.approx(gaussian_epsilon(2.0, 5e-6))


RUNS = [(10.0, 1e-6), (1007.0, 6.2e-9), (1.9, 0.02), (100.0, 0.5), (0.6, 1e-4)]


@pytest.mark.parametrize("run", one_in(5, RUNS), ids=str)
def test_divergences_are_never_below_those_of_mpmath(run: tuple[float, float]) -> None:
    noise, prob = run
    """Tiny ones too, which rounding alone would make negative, and an ε of them zero."""
    found = dict(zip(ORDERS.tolist(), divergences(noise, prob).tolist(), strict=True))
    with mpmath.workdps(50):
        q, sigma = mpmath.mpf(prob), mpmath.mpf(noise)

        def density(x: mpmath.mpf, order: mpmath.mpf) -> mpmath.mpf:
            ratio = 1 - q + q * mpmath.exp((x - mpmath.mpf(0.5) / sigma) / sigma)
            return ratio**order * mpmath.npdf(x)

        for order in (1.05, 1.5, 2.1, 2.0, 64.0):
            far = 16 + order / noise
            whole = mpmath.linspace(-16, far, 2 + int(far) // 2)
            moment = mpmath.quad(lambda x, a=mpmath.mpf(order): density(x, a), whole)
            exact = mpmath.log(moment) / (mpmath.mpf(order) - 1)
            assert exact <= found[order]
            # Of other orders dp_accounting gives bounds, some of them infinite.
            assert order != int(order) or found[order] <= exact * (1 + 1e-9) + 2 * ROUNDING
