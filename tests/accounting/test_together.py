"""Several runs as one, and the best of several: against the theorems and against draws."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from dp_accounting import dp_event
from dp_accounting.rdp import RdpAccountant
from scipy.special import ndtr, ndtri

from shuffled_dpsgd.accounting import (
    BestOf,
    Filter,
    SampledGaussian,
    calibrate_certified,
    claim_together,
)
from shuffled_dpsgd.accounting.rdp import rdp_epsilon
from shuffled_dpsgd.accounting.together import runs_of
from shuffled_dpsgd.errors import InvalidArgumentError

# SST-2 as sweeps/sst2.toml trains it: batches of 1000 of 67,349 records, three epochs.
SST2: dict[str, Any] = {"sampling_prob": 1000 / 67_349, "num_steps": 204}
DELTA = 7.4e-6


def sst2_at(epsilon: float) -> SampledGaussian:
    found = calibrate_certified(epsilon=epsilon, delta=DELTA, **SST2)
    return SampledGaussian(noise_multiplier=found.noise_multiplier, **SST2)


def test_the_best_of_ten_on_average_costs_less_than_ten() -> None:
    run = sst2_at(1.0)
    ten = claim_together([run] * 10, DELTA)
    best = claim_together([BestOf(run=run, mean=10.0)], DELTA)
    assert ten.epsilon == pytest.approx(3.11, abs=0.01)
    assert best.epsilon == pytest.approx(2.38, abs=0.01)
    assert (ten.kind, best.kind) == ("proven", "proven")
    assert best.inputs == {**run.to_json(), "best_of": 10.0}
    assert any("publishes the best one" in line for line in best.assumptions)


@pytest.mark.parametrize(
    "mean", [4.0, *(pytest.param(mean, marks=pytest.mark.slow) for mean in (1.0, 30.0))]
)
def test_the_best_of_several_is_dp_accountings(mean: float) -> None:
    run = SampledGaussian(noise_multiplier=2.0, sampling_prob=0.05, num_steps=100)
    gaussian = dp_event.PoissonSampledDpEvent(0.05, dp_event.GaussianDpEvent(2.0))
    one = dp_event.SelfComposedDpEvent(gaussian, 100)
    theirs = RdpAccountant()
    theirs.compose(dp_event.RepeatAndSelectDpEvent(one, mean, math.inf))
    ours = claim_together([BestOf(run=run, mean=mean)], 1e-6).epsilon
    assert ours == pytest.approx(theirs.get_epsilon(1e-6), rel=0.01)
    assert ours <= theirs.get_epsilon(1e-6) * (1.0 + 1e-9)


def test_the_best_of_drawn_searches_leaks_no_more_than_it_costs() -> None:
    """Gaussian scores whose mean a record moves by one; the adversary sees the best score."""
    noise, mean, delta, draws = 1.0, 5.0, 0.05, 400_000
    rng = np.random.default_rng(0)
    one = SampledGaussian(noise_multiplier=noise, sampling_prob=1.0, num_steps=1)
    epsilon = claim_together([BestOf(run=one, mean=mean)], delta).epsilon

    def best(shift: float) -> np.ndarray:
        """The largest of Poisson(mean) scores by inverting its law; −∞ where there is none."""
        log_u = np.log(rng.random(draws)) / mean + 1.0  # F(x)^K has the law e^{mean(F − 1)}
        return np.where(log_u > 0.0, shift + noise * ndtri(np.clip(log_u, 1e-300, 1.0)), -np.inf)

    present, absent = best(1.0), best(0.0)
    lost = max(
        (present > x).mean() - math.exp(epsilon) * (absent > x).mean()
        for x in np.linspace(-3.0, 6.0, 91)
    )
    assert 0.0 < lost <= delta


def test_searches_and_runs_add_up_by_their_divergences() -> None:
    run = sst2_at(1.0)
    search = BestOf(run=run, mean=3.0)
    alone, both = claim_together([search], DELTA), claim_together([search, run], DELTA)
    assert alone.epsilon < both.epsilon < alone.epsilon + 1.0 + 1e-9
    assert claim_together([run], DELTA).epsilon < rdp_epsilon(run, DELTA)


def test_a_claim_of_several_names_all_of_them_and_what_it_assumes() -> None:
    runs = [sst2_at(1.0), sst2_at(2.0)]
    claim = claim_together(runs, DELTA)
    assert claim.describe().endswith("by PLD of 2 runs")
    assert runs_of(claim) == tuple(runs)
    assert any(line.startswith("neither how many runs there are") for line in claim.assumptions)
    assert claim_together(runs[::-1], DELTA).epsilon == claim.epsilon
    alone = claim_together(runs[:1], DELTA)
    assert runs_of(alone) == (runs[0],)
    assert not any("neither how many" in line for line in alone.assumptions)


def test_choosing_the_second_run_by_the_first_breaks_one_price_and_not_the_other() -> None:
    """Two second runs cost the same with the first; whichever hurts more at what it showed is run.

    δ of that choice is the mean, over the first run's loss l, of the larger of δ_A(ε − l) and
    δ_B(ε − l), all in closed form.
    """
    delta, noise, prob, other = 1e-3, 0.8, 0.05, 5.9864
    first = SampledGaussian(noise_multiplier=3.0, sampling_prob=1.0, num_steps=1)
    rare = SampledGaussian(noise_multiplier=noise, sampling_prob=prob, num_steps=1)
    steady = SampledGaussian(noise_multiplier=other, sampling_prob=1.0, num_steps=1)

    def of_rare(epsilon: np.ndarray) -> np.ndarray:
        some = np.maximum(epsilon, math.log1p(-prob) + 1e-12)
        x = 0.5 + noise**2 * np.log((np.expm1(some) + prob) / prob)
        above = (1.0 - prob) * ndtr(-x / noise) + prob * ndtr((1.0 - x) / noise)
        return np.where(some > epsilon, -np.expm1(epsilon), above - np.exp(some) * ndtr(-x / noise))

    def of_steady(epsilon: np.ndarray) -> np.ndarray:
        near, far = 0.5 / other - epsilon * other, -0.5 / other - epsilon * other
        return ndtr(near) - np.exp(epsilon) * ndtr(far)

    z = np.linspace(-12.0, 12.0, 20_001)
    weights = np.exp(-0.5 * z * z) / np.exp(-0.5 * z * z).sum()
    loss = 0.5 / 9.0 + z / 3.0

    def worst(epsilon: float) -> float:
        both = np.maximum(of_rare(epsilon - loss), of_steady(epsilon - loss))
        return float(weights @ both)

    settled = max(claim_together([first, each], delta).epsilon for each in (rare, steady))
    for exact in (of_rare, of_steady):
        assert weights @ exact(settled - loss) == pytest.approx(delta, rel=2e-3)
    assert round(worst(settled) / delta, 2) == 1.39, "as docs/accounting.md says"
    for limit in (settled, 2.5 * settled):
        kept = Filter(epsilon=limit, delta=delta, first=first)
        claims = [kept.claim([first, each]) for each in (rare, steady)]
        assert {each.epsilon for each in claims} <= {limit, math.inf}
        assert len({each.method for each in claims}) == 1, "one order for both"
        if any(each.epsilon == math.inf for each in claims):
            continue
        assert worst(limit) <= delta
        assert all("may have been chosen" in each.assumptions[-1] for each in claims)
    assert claims[0].epsilon == limit, "some limit lets both through"
    assert Filter(epsilon=settled, delta=delta, first=first).share([first, steady]) > 1.0


def test_a_limit_that_no_order_reaches_leaves_room_for_nothing() -> None:
    run = SampledGaussian(noise_multiplier=100.0, sampling_prob=0.01, num_steps=1)
    none = Filter(epsilon=1e-6, delta=1e-30, first=run)
    assert none.share([run]) == math.inf
    assert none.claim([run]).epsilon == math.inf


def test_what_a_filter_lets_through_converts_to_its_limit() -> None:
    """By dp_accounting's own moments and conversion, at the order that the filter names."""
    run = SampledGaussian(noise_multiplier=2.0, sampling_prob=0.05, num_steps=100)
    kept = Filter(epsilon=3.0, delta=1e-6, first=run)
    order = float(kept.claim([run]).method.split()[-1])
    times = int(1.0 / kept.share([run]))
    gaussian = dp_event.PoissonSampledDpEvent(0.05, dp_event.GaussianDpEvent(2.0))

    def theirs(runs: int) -> float:
        accountant = RdpAccountant([order])
        accountant.compose(gaussian, 100 * runs)
        return float(accountant.get_epsilon(1e-6))

    assert theirs(times) <= 3.0 * (1.0 + 1e-6) < theirs(times + 1)
    assert kept.share([run] * times) <= 1.0 < kept.share([run] * (times + 1))


def test_what_is_not_covered_is_refused() -> None:
    replaced = SampledGaussian(
        noise_multiplier=1.0, sampling_prob=0.1, num_steps=1, adjacency="replace-one"
    )
    plain = SampledGaussian(noise_multiplier=1.0, sampling_prob=0.1, num_steps=1)
    with pytest.raises(InvalidArgumentError, match="add-remove for the best of several"):
        BestOf(run=replaced, mean=3.0)
    with pytest.raises(InvalidArgumentError, match="mean"):
        BestOf(run=plain, mean=0.5)
    with pytest.raises(InvalidArgumentError, match="one and the same"):
        claim_together([plain, replaced], 1e-5)
