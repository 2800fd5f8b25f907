"""The advice rests on runs that are committed, and shows what they hold."""

from __future__ import annotations

import json
from pathlib import Path

from shuffled_dpsgd.tasks.diagnosis import SWAMPED_BELOW
from shuffled_dpsgd.training.prospect import HOPELESS_BELOW, PROMISING_FROM
from shuffled_dpsgd_experiments.advice_runs import EPSILONS, table_of

ROOT = Path(__file__).resolve().parents[2]
FOUND = json.loads((ROOT / "results" / "advice_digits.json").read_text())


def test_the_page_shows_the_committed_runs() -> None:
    assert table_of(FOUND["runs"]) in (ROOT / "docs" / "advice.md").read_text()
    assert [run["target"] for run in FOUND["runs"]] == list(EPSILONS)
    assert FOUND["environment"]["torch"]


def test_the_thresholds_separate_the_committed_runs() -> None:
    for run in FOUND["runs"]:
        learned = run["heldout_accuracy"] > 0.8
        assert learned == (run["signal_to_noise_over_run"] >= PROMISING_FROM)
        assert (run["verdict"] == "hopeless") == (run["signal_to_noise_over_run"] < HOPELESS_BELOW)
        assert ("noise" in run["warnings"]) == (run["measured_over_run"] < SWAMPED_BELOW)
