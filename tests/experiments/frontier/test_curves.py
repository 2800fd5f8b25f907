"""Curves and sentences from records whose answer is known, and how rates are searched."""

from __future__ import annotations

from dataclasses import replace

import pytest
from made_up import accuracy, made_up, whole

from shuffled_dpsgd_experiments.frontier.curves import curves_of, statement
from shuffled_dpsgd_experiments.frontier.figure import caption, draw
from shuffled_dpsgd_experiments.frontier.running import tried_rates, tuned_rates
from shuffled_dpsgd_experiments.frontier.workloads import WORKLOADS, Point

SMALL = replace(
    WORKLOADS["digits"], budgets=(0.5, 2.0, 8.0, 128.0), claims=(1.0,), num_tuning_seeds=1
)


def test_a_point_below_the_curve_is_found_below_it() -> None:
    """Between its neighbours the line is below a curve that bends upwards, never by 5 points."""
    curves = curves_of(SMALL, whole(SMALL, loss=0.15))
    found = curves.comparisons()
    assert len(found) == len(SMALL.ratios)
    assert {each.verdict for each in found} == {"below DP-SGD"}
    at_ten = next(each for each in found if each.point.batch_clip_ratio == 10.0)
    assert at_ten.at_the_claim == pytest.approx(100 * (accuracy(10) - 0.15 - accuracy(1)), abs=3)
    assert "5 lie below, 0 above" in statement([curves])


def test_a_gain_is_reported_as_well() -> None:
    curves = curves_of(SMALL, whole(SMALL, loss=-0.15))
    assert {each.verdict for each in curves.comparisons()} == {"above DP-SGD"}
    assert "0 lie below, 5 above" in statement([curves])


def test_no_difference_is_claimed_within_the_spread_or_with_one_seed() -> None:
    records = whole(SMALL, loss=0.15)
    single = [each for each in records if each["stage"] == "tuning" or each["seed"] == 100]
    found = curves_of(SMALL, single).comparisons()
    assert {each.verdict for each in found} == {"no difference shown"}


def test_nothing_is_compared_beyond_the_points_of_dp_sgd() -> None:
    records = whole(replace(SMALL, budgets=(2.0, 8.0)))
    found = curves_of(replace(SMALL, budgets=(2.0, 8.0)), records).comparisons()
    assert {each.point.batch_clip_ratio for each in found} == {30.0}
    assert found[0].at_the_claim is None


def test_a_grid_is_extended_until_its_best_rate_is_inside() -> None:
    point = SMALL.points()[0]
    scores = {0.01: 0.1, 0.02: 0.2, 0.04: 0.3, 0.08: 0.4}
    records = [
        made_up(SMALL, point, stage="tuning", seed=1, rate=rate, score=score)
        for rate, score in scores.items()
    ]
    assert point not in tuned_rates(SMALL, records)
    records.append(made_up(SMALL, point, stage="tuning", seed=1, rate=0.16, score=0.35))
    assert tuned_rates(SMALL, records)[point] == pytest.approx(0.08)
    assert list(tried_rates(SMALL, records, point)) == pytest.approx([*scores, 0.16])


def test_everything_drawn_is_in_the_caption_or_the_file() -> None:
    curves = curves_of(SMALL, whole(SMALL))
    figure = draw([curves])
    labels = figure.axes[0].get_legend_handles_labels()[1]
    assert labels == ["DP-SGD", "paper's algorithm, ε = 1 claimed"]
    assert "3 seeds a point" in caption([curves])
    raw = curves.to_json()
    assert len(raw["points"]) == len(SMALL.points())
    assert all(each["verdict"] for each in raw["comparisons"])


def test_points_say_what_make_private_is_told() -> None:
    assert Point(epsilon=1.0).options()["accounting"] == "certified"
    options = Point(epsilon=1.0, batch_clip_ratio=10.0).options()
    assert (options["accounting"], options["batch_clip_norm"]) == ("paper", 10.0)
