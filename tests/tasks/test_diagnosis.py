"""A run that does not learn is told so, each fault in its own words; one that learns is not."""

from __future__ import annotations

from typing import Any

import pytest

from shuffled_dpsgd.reports import StepRecord
from shuffled_dpsgd.tasks.diagnosis import FIRST_LOOK, diagnose
from shuffled_dpsgd.training import PrivacyOptions, PrivacyPlan, make_plan, metrics
from shuffled_dpsgd.training.metrics import Unnoised


@pytest.fixture
def plan() -> PrivacyPlan:
    options = PrivacyOptions(
        dataset_size=1000,
        expected_batch_size=50,
        num_steps=100,
        delta=1e-5,
        noise_multiplier=1.0,
        shuffle="off",
    )
    return make_plan(options, sizes={"a": 400}, moved=frozenset())


def records(count: int = 20, **changes: Any) -> list[StepRecord]:
    """A run that learns, but for `changes`; a function of the step, or a value."""
    fine: dict[str, Any] = {
        "loss": lambda step: 1.0 / step,
        "clipped_share": 0.5,
        "median_norm": 1.0,
        "signal_to_noise": 0.5,
        "heldout_score": 0.9,
        "heldout_baseline": 0.5,
        "predicted_classes": 2,
    }
    made = []
    for step in range(1, count + 1):
        values = {
            name: value(step) if callable(value) else value
            for name, value in (fine | changes).items()
        }
        made.append(StepRecord(step=step, batch_size=50, seconds=0.1, learning_rate=1e-3, **values))
    return made


def test_a_run_that_learns_is_left_alone(plan: PrivacyPlan) -> None:
    assert diagnose(records(), plan) == []
    assert diagnose([], plan) == []


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("noise", {"signal_to_noise": 0.016}, "larger batch (200 instead of 50)"),
        ("loss", {"loss": lambda step: 0.7 + 0.05 * step}, "smaller learning rate than 0.001"),
        ("majority", {"heldout_score": 0.5, "predicted_classes": 1}, "one class for every record"),
        ("majority", {"heldout_score": 0.505}, "commonest class"),
        ("clipped", {"clipped_share": 1.0, "median_norm": 40.0}, "from 40 to 1"),
        ("nonfinite", {"num_nonfinite": 1}, "drawn 20 times, first at step 1"),
    ],
)
def test_each_fault_is_named(
    plan: PrivacyPlan, kind: str, changes: dict[str, Any], words: str
) -> None:
    (finding,) = diagnose(records(**changes), plan)
    assert finding.kind == kind
    assert words in finding.describe()
    assert finding.advice


def test_nothing_is_said_too_early_but_of_broken_records(plan: PrivacyPlan) -> None:
    early = records(FIRST_LOOK - 1, signal_to_noise=0.001, num_nonfinite=1)
    assert [finding.kind for finding in diagnose(early, plan)] == ["nonfinite"]


def test_clipping_everything_a_little_is_no_fault(plan: PrivacyPlan) -> None:
    assert diagnose(records(clipped_share=1.0, median_norm=3.0), plan) == []


def test_a_single_class_under_a_small_clip_is_told_of_a_larger_one(plan: PrivacyPlan) -> None:
    stuck = records(clipped_share=1.0, median_norm=3.0, heldout_score=0.5, predicted_classes=1)
    (finding,) = diagnose(stuck, plan)
    assert "a clip norm of about 3 instead of 1" in finding.advice
    (other,) = diagnose(records(heldout_score=0.5, predicted_classes=1), plan)
    assert "clip norm" not in other.advice


def test_looking_at_a_run_is_no_decision_by_its_metrics(
    plan: PrivacyPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(metrics, "say_once", said.append)
    loss, swamped = (lambda step: Unnoised(0.7 + 0.05 * step)), Unnoised(0.016)
    bad = {"loss": loss, "signal_to_noise": swamped, "heldout_score": 0.5}
    far = {"clipped_share": Unnoised(1.0), "median_norm": Unnoised(40.0)}
    kinds = {each.kind for each in diagnose(records(**bad, **far), plan)}
    assert kinds == {"noise", "loss", "majority", "clipped"}
    assert said == []
    assert swamped < 1.0
    assert len(said) == 1
