"""`account`: the ε of a run by every method, with its kind and its interval."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from shuffled_dpsgd import accounting
from shuffled_dpsgd.accounting.bracket import Bracket
from shuffled_dpsgd.cli.accounting import _remark
from shuffled_dpsgd.cli.main import app
from shuffled_dpsgd.training import PrivacyOptions, make_plan

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
    assert "claims nothing" in done.stdout
    assert "nothing is proven of any record" in done.stdout


def test_the_table_carries_the_kind_and_the_interval() -> None:
    done = CliRunner().invoke(app, ["account", "--noise-multiplier", "2", *RUN])
    assert "proven" in done.stdout
    assert "heuristic" in done.stdout
    assert "The exact ε lies between" in done.stdout


def test_an_interval_that_says_little_is_not_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of q = 1.6e-6, σ = 0.707, T = 9705, δ = 1.5e-19, which takes long to compute."""
    wide = Bracket(lower=0.0085, upper=0.5255)
    monkeypatch.setattr(accounting, "certified_bracket", lambda **_: wide)
    done = CliRunner().invoke(app, ["account", "--noise-multiplier", "2", *RUN])
    assert "The exact ε lies between" not in done.stdout
    assert run("--noise-multiplier", "2", *RUN)["certified"]["bracket"] == [0.0085, 0.5255]


SIZES = ["--dataset-size", "1000", "--batch-size", "100", "--epochs", "3", "--delta", "1e-4"]


@pytest.mark.parametrize(
    ("given", "changes"),
    [
        (["--largest-batch", "110"], {"largest_batch": 110}),
        (["--bands", "4"], {"noise": "banded", "bands": 4}),
    ],
)
def test_special_runs_cost_what_their_card_says(given: list[str], changes: dict[str, Any]) -> None:
    """`calibrate` finds the noise that a run of that ε gets; there is no interval for either."""
    found = run("--noise-multiplier", "1.1", *SIZES, *given)
    options: dict[str, Any] = {"dataset_size": 1000, "expected_batch_size": 100, "epochs": 3}
    options |= {"delta": 1e-4, "shuffle": "off", **changes}
    asked = PrivacyOptions(**options, noise_multiplier=1.1)
    claim = make_plan(asked, sizes={"a": 1}, moved=frozenset()).certified()
    assert claim is not None
    assert found["certified"]["epsilon"] == claim.epsilon
    assert found["certified"]["inputs"] == dict(claim.inputs)
    assert "bracket" not in found["certified"]
    assert found["rdp"]["epsilon"] is None
    assert "none for this accountant" in found["rdp"]["refusal"]
    wanted = ["calibrate", "--epsilon", "20", *SIZES, *given, "--json"]
    noise = json.loads(CliRunner().invoke(app, wanted).stdout)["certified"]["noise_multiplier"]
    plan = make_plan(PrivacyOptions(**options, epsilon=20), sizes={"a": 1}, moved=frozenset())
    assert noise == pytest.approx(plan.smallest_noise_multiplier, rel=1e-9)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--noise-multiplier", "-1", *RUN], "noise_multiplier"),
        (["--noise-multiplier", "1", *RUN, "--dimension", "5"], "batch_clip"),
        (["--noise-multiplier", "1", *RUN, "--largest-batch", "5"], "--dataset-size"),
        (["--noise-multiplier", "1", *RUN, "--bands", "1"], "--bands"),
        (["--noise-multiplier", "1", *RUN, "--bands", "2", "--largest-batch", "9"], "--largest"),
        (["--noise-multiplier", "1", *RUN, "--bands", "99"], "sampling_prob"),
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
