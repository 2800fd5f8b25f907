"""What is said of a plan before anything is spent."""

from __future__ import annotations

import math

import pytest

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
