"""What ε means to people: bounds against closed forms, draws and another library."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution
from scipy.special import ndtr, ndtri
from scipy.stats import binom

from shuffled_dpsgd.accounting import (
    Meaning,
    SampledGaussian,
    calibrate_certified,
    what_it_means,
)
from shuffled_dpsgd.accounting.theorem import gaussian_epsilon
from shuffled_dpsgd.core.pld import price

SST2 = {"sampling_prob": 1000 / 67_349, "num_steps": 202, "delta": 0.5 / 67_349}


def meaning_of(*, delta: float, **run: Any) -> Meaning:
    return what_it_means((SampledGaussian(**run),), delta)


@pytest.mark.parametrize(("noise", "steps"), [(0.5, 1), (2.0, 1), (30.0, 100)])
def test_without_sampling_everything_has_a_closed_form(noise: float, steps: int) -> None:
    found = meaning_of(noise_multiplier=noise, sampling_prob=1.0, num_steps=steps, delta=1e-6)
    mu = math.sqrt(steps) / noise
    advantage = 2.0 * ndtr(mu / 2.0) - 1.0
    assert advantage <= found.advantage <= advantage * 1.001
    for alpha, rate in found.true_positive_rates:
        exact = ndtr(ndtri(alpha) + mu)
        assert exact <= rate <= exact * 1.001
    for k, claim in found.groups:
        exact = gaussian_epsilon(1.0 / (k * mu), 1e-6)
        assert exact <= claim.epsilon <= exact * 1.002


def test_drawn_attackers_stay_within_the_bounds_and_come_close() -> None:
    """The likelihood-ratio test on drawn runs is the best attacker."""
    noise, prob, steps, runs = 1.0, 0.1, 20, 200_000
    rng = np.random.default_rng(0)

    def losses(joins: bool) -> np.ndarray:
        total = np.zeros(runs)
        for _ in range(steps):
            x = noise * rng.standard_normal(runs)
            x += (rng.random(runs) < prob) if joins else 0.0
            total += np.log1p(prob * np.expm1((x - 0.5) / noise**2))
        return total

    present, absent = losses(True), losses(False)
    found = meaning_of(noise_multiplier=noise, sampling_prob=prob, num_steps=steps, delta=1e-6)
    assert (present > 0).mean() - (absent > 0).mean() == pytest.approx(found.advantage, abs=0.005)
    for alpha, rate in found.true_positive_rates:
        measured = (present > np.quantile(absent, 1.0 - alpha)).mean()
        assert measured == pytest.approx(rate, rel=0.12)


OWNERS = [
    pytest.param(
        records, noise, rate, steps, marks=[] if records <= 2 <= noise else pytest.mark.slow
    )
    for records in (1, 2, 3, 4, 8)
    for noise, rate, steps in ((1.2, 0.015, 200), (0.8, 0.1, 10), (3.0, 0.3, 50), (2.0, 0.05, 30))
]


@pytest.mark.parametrize(("records", "noise", "rate", "steps"), OWNERS)
def test_owners_of_several_records_against_dp_accounting(
    records: int, noise: float, rate: float, steps: int
) -> None:
    """One record is a unit that is drawn as such."""
    run = SampledGaussian(noise_multiplier=noise, sampling_prob=rate, num_steps=steps)
    theirs = privacy_loss_distribution.from_mixture_gaussian_mechanism(
        noise,
        sensitivities=np.arange(records + 1.0),
        sampling_probs=binom.pmf(np.arange(records + 1), records, rate),
        value_discretization_interval=2e-4 if steps > 100 else 1e-3,
    )
    expected = theirs.self_compose(steps).get_epsilon_for_delta(1e-6)
    assert price(run, 1e-6, 1e-4, records) == pytest.approx(expected, rel=2e-3)


def test_sst2_at_one_costs_a_person_with_eight_records_ten() -> None:
    noise = calibrate_certified(epsilon=1.0, **SST2).noise_multiplier
    found = meaning_of(noise_multiplier=noise, **SST2)
    assert [round(claim.epsilon, 2) for _, claim in found.groups[:2]] == [2.15, 4.68]
    assert found.groups[2][1].epsilon == pytest.approx(10.5, abs=0.05)
    claim = found.groups[2][1]
    assert claim.kind == "proven"
    assert claim.inputs["records"] == 8
    assert "8 records of one owner" in claim.assumptions[-1]
    assert found.replace_one.epsilon > found.add_remove.epsilon


def test_with_hardly_any_noise_hardly_anything_is() -> None:
    found = meaning_of(noise_multiplier=0.1, sampling_prob=0.5, num_steps=20, delta=1e-5)
    assert found.advantage > 0.99
    assert all(0.99 < rate <= 1.0 for _, rate in found.true_positive_rates)


def test_without_noise_nothing_is_bounded() -> None:
    found = meaning_of(noise_multiplier=0.0, sampling_prob=0.1, num_steps=3, delta=1e-5)
    assert found.advantage == 1.0
    assert {rate for _, rate in found.true_positive_rates} == {1.0}
    assert all(math.isinf(claim.epsilon) for _, claim in found.groups)
    assert found.describe() == ("nothing is proven of any record",)


@pytest.mark.parametrize("more", [{"steps_per_block": 4}, {"largest_batch": 130}])
def test_where_nothing_is_proven_of_groups_the_lines_say_so(more: dict[str, int]) -> None:
    size = {"dataset_size": 1000} if "largest_batch" in more else {}
    run = {"noise_multiplier": 1.0, "sampling_prob": 0.1, "num_steps": 10, "delta": 1e-5}
    lines = meaning_of(**run, **more, **size).describe()
    assert "nothing is proven of whoever owns several records" in lines
    assert not any("inf" in line for line in lines)


def test_of_units_it_speaks_of_units() -> None:
    run = SampledGaussian(noise_multiplier=1.0, sampling_prob=0.1, num_steps=10)
    found, of_records = (what_it_means((run,), 1e-5, noun) for noun in ("unit", "record"))
    text = str((found.describe(), found.to_json()))
    assert "a unit is added" in text
    assert "8 units of one owner" in text
    assert "record " not in text
    assert found.to_json()["epsilon_of"] == "unit"
    assert found.groups[0][1].epsilon == of_records.groups[0][1].epsilon


def test_every_line_and_every_figure_carries_its_kind() -> None:
    found = meaning_of(noise_multiplier=1.0, sampling_prob=0.01, num_steps=10, delta=1e-5)
    assert all("proven" in line for line in found.describe())
    data = found.to_json()
    assert data["attacker"]["kind"] == "proven"
    assert all(row["kind"] == "proven" for row in data["epsilon_by_records"])
