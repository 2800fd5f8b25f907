"""`account`: the ε of a run by every method, with its kind and its interval."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from shuffled_dpsgd.cli.accounting import _remark
from shuffled_dpsgd.cli.main import app

RUN = ["--sampling-prob", "0.02", "--num-steps", "500", "--delta", "5e-6"]


def run(*arguments: str) -> dict[str, Any]:
    done = CliRunner().invoke(app, ["account", *arguments, "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_every_method_with_its_kind() -> None:
    paper = ["--dimension", "85800000", "--batch-clip", "100"]
    found = run("--noise-multiplier", "2.33", *RUN, *paper)
    kinds = {name: found[name]["kind"] for name in found if name not in ("run", "meaning")}
    assert kinds == {
        "certified": "proven",
        "rdp": "proven",
        "gdp": "heuristic",
        "advanced_composition": "proven",
        "paper": "heuristic",
    }
    assert all(found[name]["noise_multiplier"] == 2.33 for name in kinds)
    assert found["certified"]["epsilon"] == pytest.approx(0.795, abs=2e-3)
    low, high = found["certified"]["bracket"]
    assert low < found["certified"]["epsilon"] == high
    for field in ("step_epsilon", "step_delta", "unshuffled_noise_multiplier", "falls_back"):
        assert field in found["paper"]
    assert found["paper"]["unshuffled_noise_multiplier"] > 10.0


def test_what_it_means_to_people_with_kinds() -> None:
    found = run("--noise-multiplier", "1.947", *RUN)["meaning"]
    assert found["kind"] == found["attacker"]["kind"] == "proven"
    by_adjacency = found["epsilon_by_adjacency"]
    assert by_adjacency["add-remove"]["epsilon"] == pytest.approx(1.0, abs=2e-3)
    assert by_adjacency["replace-one"]["epsilon"] == pytest.approx(1.90, abs=5e-3)
    assert [row["records"] for row in found["epsilon_by_records"]] == [2, 4, 8]
    assert {row["kind"] for row in found["epsilon_by_records"]} == {"proven"}
    rates = found["attacker"]["true_positive_rates"]
    assert [row["false_positive_rate"] for row in rates] == [0.01, 0.001]
    done = CliRunner().invoke(app, ["account", "--noise-multiplier", "1.947", *RUN])
    for words in ("best attacker (proven)", "0.1% false positives", "several records (proven)"):
        assert words in done.stdout


def test_an_impossible_estimate_is_called_so() -> None:
    assert _remark("paper", {"kind": "heuristic", "epsilon": 0.36}) == "estimate"
    assert "cannot be" in _remark("paper", {"kind": "heuristic", "epsilon": 0.0})


def test_sizes_and_probabilities_are_the_same_run() -> None:
    sizes = ["--dataset-size", "50000", "--batch-size", "1000", "--epochs", "10"]
    by_size = run("--noise-multiplier", "3", "--delta", "5e-6", *sizes)
    assert by_size["certified"] == run("--noise-multiplier", "3", *RUN)["certified"]


def test_no_noise_is_infinite_for_people_and_null_for_machines() -> None:
    assert run("--noise-multiplier", "0", *RUN)["certified"]["epsilon"] is None
    paper = ["--dimension", "10", "--batch-clip", "1"]
    done = CliRunner().invoke(app, ["account", "--noise-multiplier", "0", *RUN, *paper])
    assert done.exit_code == 0
    assert "∞" in done.stdout


def test_the_table_carries_the_kind_and_the_interval() -> None:
    done = CliRunner().invoke(app, ["account", "--noise-multiplier", "2", *RUN])
    assert "proven" in done.stdout
    assert "heuristic" in done.stdout
    assert "The exact ε lies between" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--noise-multiplier", "-1", *RUN], "noise_multiplier"),
        (["--noise-multiplier", "1", *RUN, "--dimension", "5"], "batch_clip"),
        (["--noise-multiplier", "1", *RUN, "--batch-clip", "5"], "dimension"),
        (
            ["--noise-multiplier", "1", "--delta", "1e-5", "--dataset-size", "10"],
            "sampling",
        ),
        (
            [
                *("--noise-multiplier", "1", "--delta", "1e-5", "--dataset-size", "10"),
                *("--batch-size", "20", "--epochs", "1"),
            ],
            "batch_size",
        ),
    ],
)
def test_bad_input_is_one_line_and_status_two(arguments: list[str], named: str) -> None:
    done = CliRunner().invoke(app, ["account", *arguments])
    assert done.exit_code == 2
    assert done.stderr.startswith(f"error: {named}")
