"""What is said of a plan before anything is spent."""

from __future__ import annotations

import math

import pytest

from shuffled_dpsgd.tasks import digits, parse_config
from shuffled_dpsgd.tasks.advice import advise_run
from shuffled_dpsgd.training import PrivacyOptions, make_plan
from shuffled_dpsgd.training.planning import large_delta


@pytest.mark.parametrize(("delta", "warned"), [(1e-3, True), (0.1, True), (9e-4, False)])
def test_a_delta_that_allows_a_whole_record_is_told(delta: float, warned: bool) -> None:
    options = PrivacyOptions(
        dataset_size=1000,
        expected_batch_size=50,
        num_steps=2,
        delta=delta,
        noise_multiplier=1.0,
        shuffle="off",
    )
    warning = large_delta(make_plan(options, sizes={"a": 4}, moved=frozenset()))
    assert (warning is not None) == warned
    assert warning is None or "not below 1/1,000" in warning


def test_nothing_is_said_where_nothing_is_claimed() -> None:
    options = PrivacyOptions(
        dataset_size=1000,
        expected_batch_size=50,
        num_steps=2,
        delta=0.1,
        clip_norm=math.inf,
        method="non-private",
    )
    assert large_delta(make_plan(options, sizes={"a": 4}, moved=frozenset())) is None


@pytest.mark.slow
def test_what_the_planned_largest_batch_costs_is_told() -> None:
    raw = digits.default_config().to_json()
    batch = raw["training"]["expected_batch_size"]
    raw["model"] = {"name": "linear-digits"}
    raw["training"]["largest_batch"] = batch + 10
    found = advise_run(parse_config(raw))
    (row,) = (each for each in found.alternatives if each.change.startswith("largest_batch"))
    assert row.change == f"largest_batch={batch + 10}"
    assert row.noise > 1.1
