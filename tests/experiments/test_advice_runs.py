"""The advice rests on runs that are committed, and shows what they hold."""

from __future__ import annotations

import json
import re
from itertools import product
from pathlib import Path

import pytest

from shuffled_dpsgd.tasks import parse_config
from shuffled_dpsgd.tasks.diagnosis import SWAMPED_BELOW
from shuffled_dpsgd.tasks.recipes import RECIPES
from shuffled_dpsgd.tasks.run import prepare
from shuffled_dpsgd.training.prospect import HOPELESS_BELOW, PROMISING_FROM
from shuffled_dpsgd_experiments.advice_runs import EPSILONS, SEEDS, by_target, table_of, train_at
from shuffled_dpsgd_experiments.provenance import FIRST_STEPS, Provenance, data_digest

ROOT = Path(__file__).resolve().parents[2]
FOUND = json.loads((ROOT / "results" / "advice_digits.json").read_text())


def test_the_page_shows_the_committed_runs() -> None:
    assert table_of(FOUND["runs"]) in (ROOT / "docs" / "advice.md").read_text()
    assert [(run["target"], run["seed"]) for run in FOUND["runs"]] == [*product(EPSILONS, SEEDS)]
    assert FOUND["environment"]["torch"]


@pytest.mark.parametrize(
    ("file", "recipe"),
    [("advice_digits", "recipe/digits"), ("linear_digits", "recipe/digits-linear")],
)
def test_committed_runs_begin_as_they_do_now(tmp_path: Path, file: str, recipe: str) -> None:
    """With the same weights, records and noise, calibrated to rounding."""
    runs = json.loads((ROOT / "results" / f"{file}.json").read_text())["runs"]
    settings = RECIPES[recipe].to_run() | {"seed": 1}
    settings["privacy"]["epsilon"] = 3.0
    begun = prepare(parse_config(settings), tmp_path / "run")
    made = Provenance(begun.private.model, data_digest(begun.task.train_data)).to_json()
    (record,) = (run for run in runs if (run["target"], run["seed"]) == (3.0, 1))
    for key in ("initial_weights", "data", "streams"):
        assert record[key] == made[key]
    noise = begun.private.plan.smallest_noise_multiplier
    assert record["noise_multiplier"] == pytest.approx(noise, rel=1e-3)
    begun.private.close()
    for run in runs:
        assert re.fullmatch("[0-9a-f]{40}", run["commit"])
        assert len(run["first_losses"]) == FIRST_STEPS


@pytest.mark.slow
def test_a_committed_run_comes_out_again() -> None:
    runs = json.loads((ROOT / "results" / "linear_digits.json").read_text())["runs"]
    (record,) = (run for run in runs if (run["target"], run["seed"]) == (3.0, 1))
    again = train_at(3.0, "recipe/digits-linear", 1)
    assert again["first_losses"] == pytest.approx(record["first_losses"], rel=1e-3)
    assert again["heldout_accuracy"] == pytest.approx(record["heldout_accuracy"], abs=5 / 360)


def test_the_thresholds_separate_the_committed_runs() -> None:
    for run in by_target(FOUND["runs"]):
        learned = run["heldout_accuracy"] > 0.8
        assert learned == (run["signal_to_noise_over_run"] >= PROMISING_FROM)
        assert (run["verdict"] == "hopeless") == (run["signal_to_noise_over_run"] < HOPELESS_BELOW)
        assert ("noise" in run["warnings"]) == (run["measured_over_run"] < SWAMPED_BELOW)
