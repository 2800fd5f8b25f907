"""The likelihood-ratio attack of the knock-out on losses whose law is known."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.tasks import digits
from shuffled_dpsgd_experiments.audits.black_box import Arm, BlackBoxReport, BlackBoxSetting
from shuffled_dpsgd_experiments.audits.targets import black_box_target


def report(num_seeds: int = 40, leak: float = 1.0) -> BlackBoxReport:
    """Records differ in difficulty far more than by membership: ratios see what losses do not."""
    rng = np.random.default_rng(0)
    included = rng.random((num_seeds, 60)) < 0.5
    hard = 3.0 * rng.standard_normal(60)

    def arm(shift: float, leak: float = leak) -> Arm:
        logits = hard + leak * included + 0.5 * rng.standard_normal(included.shape) + shift
        return Arm(losses=np.logaddexp(0.0, -logits), included=included)

    off = arm(0.0)
    return BlackBoxReport(
        setting=BlackBoxSetting(num_seeds=num_seeds, num_canaries=60),
        plan={"delta": 1e-5},
        arms={"off": off, "on": arm(0.0), "on-paired": off, "without-privacy": arm(0.0, 1.0)},
        confidence=0.95,
        seconds=0.0,
    )


def test_a_run_that_counts_in_a_budget_has_no_black_box() -> None:
    config = digits.default_config()
    config = replace(config, privacy=replace(config.privacy, budget="b.json"))
    with pytest.raises(InvalidArgumentError, match=r"budget: .*black box"):
        black_box_target(config, noise_multiplier=None, num_steps=None)


def test_ratios_beat_losses_and_equal_arms_compare_as_equal() -> None:
    found = report()
    assert found.areas("off", "ratio").mean() > 0.85 > 0.7 > found.areas("off", "loss").mean()
    assert found.largest_paired_difference == 0.0
    for attack in ("loss", "ratio"):
        gap = found.comparison(attack)
        assert gap["low"] < 0.0 < gap["high"]
        assert abs(gap["mean_difference"]) < 0.05


def test_areas_come_with_privacy_and_without_and_with_intervals() -> None:
    found = report(num_seeds=10, leak=0.2).to_json()["arms"]
    areas = {name: arm["ratio"]["area_over_seeds"] for name, arm in found.items()}
    for name, area in areas.items():
        assert area["low"] < area["mean"] < area["high"], name
    assert areas["without-privacy"]["low"] > areas["on"]["high"]


def test_runs_without_privacy_are_not_held_against_the_claims() -> None:
    """Their leak is not what the claims are about."""
    loud = report(num_seeds=10, leak=0.0)
    assert loud.areas("without-privacy", "ratio").mean() > 0.8
    assert loud.strongest[0] == 0.0


def test_without_a_leak_ratios_guess() -> None:
    """The run that is scored is left out of its own means, so nothing is found in noise."""
    assert report(leak=0.0).areas("off", "ratio").mean() == pytest.approx(0.5, abs=0.03)


def test_settings_that_compare_nothing_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="num_seeds"):
        BlackBoxSetting(num_seeds=2)
