"""One suite for every accountant: whoever prices a run obeys these rules or does not ship."""

from __future__ import annotations

import math

import pytest

from shuffled_dpsgd.accounting import (
    Accountant,
    SampledGaussian,
    Target,
    accountants,
    certified_claim,
    compare,
)
from shuffled_dpsgd.accounting.theorem import gaussian_epsilon
from shuffled_dpsgd.errors import InvalidArgumentError

ALL = accountants(dimension=10**6, batch_clip=10.0)
IDS = [each.name for each in ALL]
PROVEN = [each for each in ALL if each.kind == "proven"]
RUN = {"sampling_prob": 0.02, "num_steps": 200}
DELTA = 1e-5

every = pytest.mark.parametrize("accountant", ALL, ids=IDS)
every_proven = pytest.mark.parametrize("accountant", PROVEN, ids=[each.name for each in PROVEN])


def epsilon(accountant: Accountant, noise: float, prob: float, steps: int) -> float:
    mechanism = SampledGaussian(noise_multiplier=noise, sampling_prob=prob, num_steps=steps)
    return accountant.claim(mechanism, DELTA).epsilon


def test_the_five_are_there_with_their_kinds() -> None:
    assert {each.name: each.kind for each in ALL} == {
        "certified": "proven",
        "rdp": "proven",
        "gdp": "heuristic",
        "advanced_composition": "proven",
        "paper": "heuristic",
    }


@every
def test_a_claim_carries_its_kind_its_inputs_and_its_assumptions(accountant: Accountant) -> None:
    claim = accountant.claim(SampledGaussian(noise_multiplier=1.5, **RUN), DELTA)
    assert claim.kind == accountant.kind
    assert accountant.kind in claim.describe()
    assert claim.delta == DELTA
    assert claim.assumptions
    assert claim.inputs["noise_multiplier"] == 1.5
    assert claim.inputs["num_steps"] == 200


@every
def test_more_noise_never_costs_more(accountant: Accountant) -> None:
    values = [epsilon(accountant, noise, 0.02, 200) for noise in (0.6, 0.9, 1.5, 4.0, 20.0)]
    assert values == sorted(values, reverse=True)


@every
def test_more_steps_never_cost_less(accountant: Accountant) -> None:
    values = [epsilon(accountant, 1.2, 0.02, steps) for steps in (1, 3, 30, 300)]
    assert values == sorted(values)


@every
def test_larger_batches_never_cost_less(accountant: Accountant) -> None:
    values = [epsilon(accountant, 1.2, prob, 50) for prob in (0.001, 0.01, 0.1, 1.0)]
    assert values == sorted(values)


@every_proven
def test_a_proven_epsilon_is_never_below_the_exact_gaussian(accountant: Accountant) -> None:
    for noise in (0.7, 2.0, 8.0):
        exact = gaussian_epsilon(noise, DELTA)
        assert epsilon(accountant, noise, 1.0, 1) >= exact * (1 - 1e-9)


@every_proven
def test_a_proven_epsilon_is_never_below_the_certified_interval(accountant: Accountant) -> None:
    """All proven accountants bound the same quantity, so none may undercut its lower bound."""
    from shuffled_dpsgd.accounting import certified_bracket

    for noise in (0.7, 1.5, 6.0):
        bracket = certified_bracket(noise_multiplier=noise, **RUN, delta=DELTA)
        assert epsilon(accountant, noise, 0.02, 200) >= bracket.lower


@every
@pytest.mark.parametrize("target", [pytest.param(0.5, marks=pytest.mark.slow), 3.0])
def test_calibration_meets_its_target_from_below_and_is_tight(
    accountant: Accountant, target: float
) -> None:
    found = accountant.calibrate(Target(epsilon=target, delta=DELTA, **RUN))
    assert found.claim.epsilon <= target
    assert found.claim.kind == accountant.kind
    assert epsilon(accountant, found.noise_multiplier, 0.02, 200) <= target * (1 + 1e-9)
    assert epsilon(accountant, found.noise_multiplier * 0.998, 0.02, 200) > target * (1 - 1e-4)
    assert found.to_json()["kind"] == accountant.kind


@every
def test_no_noise_is_infinite(accountant: Accountant) -> None:
    assert epsilon(accountant, 0.0, 0.02, 200) == math.inf


@every
def test_adjacency_is_priced_or_refused_never_ignored(accountant: Accountant) -> None:
    mechanism = SampledGaussian(noise_multiplier=2.0, **RUN, adjacency="replace-one")
    target = Target(epsilon=1.0, delta=DELTA, **RUN, adjacency="replace-one")
    if "replace-one" in accountant.adjacencies:
        assert accountant.claim(mechanism, DELTA).epsilon > epsilon(accountant, 2.0, 0.02, 200)
        return
    for refused in (
        lambda: accountant.claim(mechanism, DELTA),
        lambda: accountant.calibrate(target),
    ):
        with pytest.raises(InvalidArgumentError) as refusal:
            refused()
        assert refusal.value.argument == "adjacency"


@every
@pytest.mark.parametrize("delta", [0.0, 1.0, -1e-5])
def test_an_impossible_delta_is_refused(accountant: Accountant, delta: float) -> None:
    with pytest.raises(InvalidArgumentError) as refusal:
        accountant.claim(SampledGaussian(noise_multiplier=1.0, **RUN), delta)
    assert refusal.value.argument == "delta"


@pytest.mark.slow
def test_compare_holds_one_claim_per_accountant() -> None:
    claims = compare(noise_multiplier=1.5, **RUN, delta=DELTA, dimension=10**6, batch_clip=10.0)
    assert list(claims) == IDS
    assert claims["certified"] == certified_claim(noise_multiplier=1.5, **RUN, delta=DELTA)
    target = Target(epsilon=1.0, **RUN, delta=DELTA)
    noise = {each.name: each.calibrate(target) for each in accountants()}
    assert "paper" not in noise
    assert noise["gdp"].noise_multiplier < noise["certified"].noise_multiplier
    assert noise["certified"].noise_multiplier < noise["rdp"].noise_multiplier


def test_the_paper_is_never_priced_with_an_unstated_batch_clip() -> None:
    with pytest.raises(InvalidArgumentError) as refusal:
        compare(noise_multiplier=1.5, **RUN, delta=DELTA, dimension=10**6)
    assert refusal.value.argument == "batch_clip"
    with pytest.raises(InvalidArgumentError) as refusal:
        compare(noise_multiplier=1.5, **RUN, delta=DELTA, batch_clip=1.0)
    assert refusal.value.argument == "dimension"
