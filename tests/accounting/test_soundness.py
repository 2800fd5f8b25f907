"""Facts that decide what may be claimed, as tests; docs/claims.md tells them as prose."""

from __future__ import annotations

import pytest

from shuffled_dpsgd.accounting import (
    Target,
    accountants,
    calibrate_certified,
    calibrate_paper,
    calibrate_rdp,
    certified_claim,
)

VIT = {"delta": 5e-6, "sampling_prob": 0.02, "num_steps": 500}
D_VIT = 85_800_000


def test_the_maximum_tells_the_worlds_apart() -> None:
    """Why: the spike stands 7.3σ high, the largest of 85.8M noise values about 5.7σ."""
    from scipy.special import ndtri

    noise = calibrate_paper(epsilon=1.0, dimension=D_VIT, batch_clip=1.0, **VIT).noise_multiplier
    assert 2.0 / noise == pytest.approx(7.3, abs=0.05)
    assert -ndtri(0.5 / D_VIT) == pytest.approx(5.7, abs=0.1)


@pytest.mark.parametrize(
    ("noise", "epsilon", "accuracy"), [(0.273, 108.0, 1.0), (0.746, 5.9, 0.05), (2.33, 0.80, 0.01)]
)
def test_certified_epsilon_at_the_papers_noise(
    noise: float, epsilon: float, accuracy: float
) -> None:
    claim = certified_claim(noise_multiplier=noise, **VIT)
    assert claim.epsilon == pytest.approx(epsilon, abs=accuracy)


@pytest.mark.parametrize(
    ("epsilon", "noise"), [(1.0, 1.95), (0.5, 3.44), (0.25, 6.35), (0.1, 14.6)]
)
def test_plain_training_needs_little_noise_when_certified(epsilon: float, noise: float) -> None:
    found = calibrate_certified(epsilon=epsilon, **VIT)
    assert found.noise_multiplier == pytest.approx(noise, rel=2.5e-3)


def test_the_papers_noise_barely_moves_while_the_truth_does() -> None:
    strict, loose = (
        calibrate_paper(epsilon=epsilon, dimension=D_VIT, batch_clip=1.0, **VIT).noise_multiplier
        for epsilon in (0.1, 1.0)
    )
    assert strict / loose < 1.005


def test_gaussian_dp_under_noises() -> None:
    noise = {each.name: each.calibrate(Target(epsilon=1.0, **VIT)) for each in accountants()}
    assert noise["gdp"].noise_multiplier == pytest.approx(1.87, abs=0.005)
    assert noise["certified"].noise_multiplier == pytest.approx(1.946, abs=0.002)
    real = certified_claim(noise_multiplier=noise["gdp"].noise_multiplier, **VIT)
    assert real.epsilon > 1.04


def test_orders_up_to_63_fail_at_strong_privacy_and_ours_do_not() -> None:
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
    from dp_accounting.rdp import RdpAccountant

    ours = calibrate_rdp(epsilon=0.1, **VIT).noise_multiplier
    certified = calibrate_certified(epsilon=0.1, **VIT).noise_multiplier
    assert certified < ours < 1.15 * certified
    short = RdpAccountant([1 + step / 10 for step in range(1, 100)] + list(range(12, 64)))
    short.compose(PoissonSampledDpEvent(0.02, GaussianDpEvent(ours)), 500)
    assert short.get_epsilon(5e-6) > 0.13
