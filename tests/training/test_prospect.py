"""What a plan can hope for: a bound that holds, and advice that follows from it."""

from __future__ import annotations

import math

import pytest

from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.training import PrivacyOptions, make_plan
from shuffled_dpsgd.training.prospect import (
    PROMISING_FROM,
    Prospect,
    best_batch,
    calibrated_prospect,
    needs_of,
    other_batches,
    prospect_of,
    suggested_learning_rate,
)
from training.cases import mlp_case, run
from training.test_own_loops import private_mlp


def plain(**changes: int) -> Prospect:
    settings = {
        "dataset_size": 2000,
        "expected_batch_size": 100,
        "num_steps": 100,
        "dimension": 10_000,
    }
    return calibrated_prospect(epsilon=3.0, delta=1e-5, **(settings | changes))


def test_the_ratio_of_a_plan_by_hand() -> None:
    options = PrivacyOptions(
        dataset_size=1000,
        expected_batch_size=50,
        num_steps=16,
        delta=1e-5,
        noise_multiplier=2.0,
        clip_norm=0.1,
        shuffle="off",
    )
    prospect = prospect_of(make_plan(options, sizes={"a": 60, "b": 40}, moved=frozenset()))
    assert prospect.per_step == pytest.approx(50 / (2.0 * 10.0))
    assert prospect.over_run == pytest.approx(4 * 2.5)
    assert prospect.verdict == "promising"


def test_a_batch_clip_limits_the_signal() -> None:
    options = PrivacyOptions(
        dataset_size=1000,
        expected_batch_size=50,
        num_steps=4,
        delta=1e-5,
        noise_multiplier=2.0,
        unshuffled_noise_multiplier=3.0,
        accounting="paper",
        batch_clip_norm=1.0,
    )
    prospect = prospect_of(make_plan(options, sizes={"a": 100}, moved=frozenset({"a"})))
    assert prospect.signal_limit == 1.0
    assert prospect.verdict == "hopeless"


def test_no_step_of_a_run_exceeds_the_bound() -> None:
    private = private_mlp(noise_multiplier=0.7, clip_norm=0.3)
    ratios: list[tuple[float, int]] = []

    def note() -> None:
        metrics = private.last_metrics
        assert metrics is not None
        ratios.append((metrics.signal_to_noise, metrics.batch_size))

    private.on_update(note)
    run(private, mlp_case())
    bound = prospect_of(private.plan)
    assert ratios
    for ratio, size in ratios:  # The bound is for a batch of the expected size.
        assert ratio <= bound.per_step * size / bound.expected_batch_size + 1e-9


def test_larger_batches_help_and_the_best_is_no_larger_than_needed() -> None:
    now = plain()
    others = other_batches(now, epsilon=3.0, delta=1e-5)
    assert [p.expected_batch_size for p in others] == [200]  # 400 would leave 25 steps
    assert others[0].num_steps == 50
    assert others[0].over_run > now.over_run
    assert best_batch([now, *others]) in (now, *others)
    assert best_batch([now, now]) is now


@pytest.mark.slow
def test_what_is_needed_is_enough() -> None:
    now = plain(dimension=1_000_000)
    needs = needs_of(now, epsilon=3.0, delta=1e-5)
    assert now.verdict == "hopeless"
    fewer = plain(dimension=needs.dimension)
    assert fewer.over_run == pytest.approx(PROMISING_FROM, rel=1e-2)
    factor = needs.dataset_size / now.dataset_size
    assert now.over_run * factor == pytest.approx(PROMISING_FROM, rel=1e-2)
    assert needs.epsilon is None or needs.epsilon > 3.0
    enough = needs_of(plain(dimension=100), epsilon=3.0, delta=1e-5)
    assert (enough.dataset_size, enough.dimension, enough.epsilon) == (2000, 100, 3.0)


def test_the_learning_rate_follows_the_random_walk() -> None:
    now = plain()
    rate = suggested_learning_rate(now, weight_scale=0.2, optimizer="adamw", clip_norm=1.0)
    assert rate == pytest.approx(0.5 * 0.2 / math.sqrt(100))
    sgd = suggested_learning_rate(now, weight_scale=0.2, optimizer="sgd", clip_norm=1.0)
    step = now.noise_multiplier / 100
    assert sgd == pytest.approx(0.01 / step, rel=0.1)


def test_impossible_sizes_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="dimension"):
        plain(dimension=0)
