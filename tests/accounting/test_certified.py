"""Certified ε: against dp_accounting at fine discretisation, monotone, calibrated safely."""

from __future__ import annotations

import itertools
import math

import pytest
from dp_accounting.pld import privacy_loss_distribution
from hypothesis import given, settings
from hypothesis import strategies as st

from shuffled_dpsgd.accounting import (
    calibrate_certified,
    certified_bracket,
    certified_claim,
)
from shuffled_dpsgd.accounting.theorem import gaussian_epsilon
from shuffled_dpsgd.errors import InvalidArgumentError
from slow_cases import one_in

VIT = {"sampling_prob": 0.02, "num_steps": 500, "delta": 5e-6}
GRID = [
    *itertools.product((0.8, 1.0, 2.0, 6.0), (0.002, 0.02, 0.1), (1, 50, 1000), (1e-5,)),
    *itertools.product((0.7, 1.5, 5.0), (0.005, 0.05), (10, 400), (1e-6, 1e-9)),
    *itertools.product((1.0, 3.0, 20.0), (1.0,), (1, 20), (1e-5,)),
]
QUICK = GRID[1::6]


def reference(
    sigma: float, prob: float, steps: int, delta: float, *, rough: float, pessimistic: bool
) -> float:
    """dp_accounting directly, on a grid whose rounding costs about 2e-5 of ε when pessimistic."""
    fine = privacy_loss_distribution.from_gaussian_mechanism(
        sigma,
        sampling_prob=prob,
        value_discretization_interval=min(1e-3, rough / (300.0 * math.sqrt(steps))),
        pessimistic_estimate=pessimistic,
        use_connect_dots=pessimistic,
    )
    return fine.self_compose(steps).get_epsilon_for_delta(delta)


def check_against_reference(setting: tuple[float, float, int, float]) -> None:
    sigma, prob, steps, delta = setting
    ours = certified_claim(
        noise_multiplier=sigma, sampling_prob=prob, num_steps=steps, delta=delta
    ).epsilon
    rough = max(ours, 1e-3)
    exact = reference(*setting, rough=rough, pessimistic=True)
    assert ours == pytest.approx(exact, rel=0.01, abs=1e-6)
    assert ours >= reference(*setting, rough=rough, pessimistic=False)


def test_the_grid_is_as_large_as_promised() -> None:
    assert len(set(GRID)) >= 60


@pytest.mark.parametrize("setting", one_in(3, QUICK), ids=str)
def test_within_one_per_cent_of_a_fine_grid_and_above_its_optimistic_bound(
    setting: tuple[float, float, int, float],
) -> None:
    check_against_reference(setting)


@pytest.mark.slow
@pytest.mark.parametrize("setting", sorted(set(GRID) - set(QUICK)), ids=str)
def test_the_rest_of_the_grid(setting: tuple[float, float, int, float]) -> None:
    check_against_reference(setting)


@pytest.mark.parametrize("sigma", [0.5, 1.0, 4.0])
@pytest.mark.parametrize("steps", [1, 30])
def test_without_sampling_it_brackets_the_exact_gaussian(sigma: float, steps: int) -> None:
    run = {"noise_multiplier": sigma, "sampling_prob": 1.0, "num_steps": steps, "delta": 1e-5}
    exact = gaussian_epsilon(sigma / math.sqrt(steps), 1e-5)
    bracket = certified_bracket(**run)
    assert bracket.lower <= exact <= bracket.upper
    assert bracket.upper == pytest.approx(exact, rel=3e-4)
    assert certified_claim(**run).epsilon == bracket.upper


def test_the_bracket_is_narrow() -> None:
    for sigma in (1.95, 14.6):
        bracket = certified_bracket(noise_multiplier=sigma, **VIT)
        assert 0.97 * bracket.upper < bracket.lower < bracket.upper


@settings(max_examples=5, deadline=None)
@given(
    sigma=st.floats(0.7, 20.0),
    prob=st.floats(0.001, 0.3),
    steps=st.integers(1, 500),
    factor=st.floats(1.05, 3.0),
)
def test_monotone_in_noise_sampling_and_steps(
    sigma: float, prob: float, steps: int, factor: float
) -> None:
    def epsilon(s: float, q: float, t: int) -> float:
        return certified_claim(
            noise_multiplier=s, sampling_prob=min(q, 1.0), num_steps=t, delta=1e-5
        ).epsilon

    base = epsilon(sigma, prob, steps)
    slack = 1.0 + 2e-4
    assert epsilon(sigma * factor, prob, steps) <= base * slack
    assert epsilon(sigma, prob * factor, steps) * slack >= base
    assert epsilon(sigma, prob, math.ceil(steps * factor)) * slack >= base


@pytest.mark.parametrize("adjacency", ["add-remove", "replace-one"])
@pytest.mark.parametrize(
    ("epsilon", "prob", "steps"), [(0.1, 0.02, 500), (1.0, 0.02, 500), (8.0, 0.005, 2000)]
)
def test_calibration_is_tight_and_never_above_target(
    epsilon: float, prob: float, steps: int, adjacency: str
) -> None:
    run = {"sampling_prob": prob, "num_steps": steps, "delta": 5e-6, "adjacency": adjacency}
    found = calibrate_certified(epsilon=epsilon, **run)  # type: ignore[arg-type]
    assert found.claim.epsilon <= epsilon
    again = certified_claim(noise_multiplier=found.noise_multiplier, **run)  # type: ignore[arg-type]
    assert again == found.claim
    less = certified_claim(noise_multiplier=found.noise_multiplier * (1 - 1e-3), **run)  # type: ignore[arg-type]
    assert less.epsilon > epsilon * (1 - 1e-4)


@pytest.mark.parametrize(("prob", "steps"), [(1.0, 1), (0.01, 1000)])
def test_calibration_to_next_to_nothing_ends(prob: float, steps: int) -> None:
    """There a claim's own accuracy decides, and ε falls in steps."""
    run = {"delta": 1e-5, "sampling_prob": prob, "num_steps": steps}
    assert calibrate_certified(epsilon=1e-6, **run).claim.epsilon <= 1e-6  # type: ignore[arg-type]


def test_replace_one_costs_more_than_add_remove() -> None:
    plain = certified_claim(noise_multiplier=2.0, **VIT)
    replaced = certified_claim(noise_multiplier=2.0, adjacency="replace-one", **VIT)
    assert replaced.epsilon > 1.3 * plain.epsilon
    assert "replace-one" in replaced.assumptions[-1]
    gaussian = certified_claim(
        noise_multiplier=3.0,
        sampling_prob=1.0,
        num_steps=1,
        delta=1e-5,
        adjacency="replace-one",
    )
    assert gaussian.epsilon == pytest.approx(gaussian_epsilon(1.5, 1e-5), rel=1e-3)


def test_no_noise_is_no_privacy() -> None:
    assert certified_claim(noise_multiplier=0.0, **VIT).epsilon == math.inf
    assert certified_bracket(noise_multiplier=0.0, **VIT).lower == math.inf
    assert certified_claim(noise_multiplier=1e-300, **VIT).epsilon == math.inf


@pytest.mark.parametrize(
    ("changes", "argument"),
    [
        ({"noise_multiplier": -1.0}, "noise_multiplier"),
        ({"noise_multiplier": math.nan}, "noise_multiplier"),
        ({"sampling_prob": 0.0}, "sampling_prob"),
        ({"sampling_prob": 1.01}, "sampling_prob"),
        ({"num_steps": 0}, "num_steps"),
        ({"num_steps": math.nan}, "num_steps"),
        ({"num_steps": math.inf}, "num_steps"),
        ({"delta": 0.0}, "delta"),
        ({"delta": 1.0}, "delta"),
        ({"delta": 9e-31}, "delta"),
        ({"adjacency": "swap"}, "adjacency"),
    ],
)
def test_impossible_requests_name_the_argument(changes: dict[str, object], argument: str) -> None:
    with pytest.raises(InvalidArgumentError) as refusal:
        certified_claim(**{"noise_multiplier": 1.0, **VIT, **changes})  # type: ignore[arg-type]
    assert refusal.value.argument == argument


@pytest.mark.parametrize(
    "epsilon", [0.0, -1.0, math.inf, 1e-9, pytest.param(1e12, marks=pytest.mark.slow)]
)
def test_a_target_that_no_noise_meets_is_refused(epsilon: float) -> None:
    with pytest.raises(InvalidArgumentError) as refusal:
        calibrate_certified(epsilon=epsilon, delta=1e-12, sampling_prob=0.02, num_steps=500)
    assert refusal.value.argument == "epsilon"
    assert refusal.value.remedy
