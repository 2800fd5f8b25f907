"""`calibrate`: every method with its kind, and the paper only with its batch clip."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from shuffled_dpsgd.cli.main import app

RUN = ["--delta", "5e-6", "--dataset-size", "50000", "--batch-size", "1000", "--epochs", "10"]
PAPER = ["--dimension", "85800000", "--batch-clip", "1"]


def run(*arguments: str) -> dict[str, Any]:
    done = CliRunner().invoke(app, ["calibrate", *arguments, "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_the_six_objects_with_their_fields() -> None:
    found = run("--epsilon", "1", *RUN, *PAPER)
    for name in ("certified", "rdp", "gdp", "advanced_composition", "paper"):
        assert {"epsilon", "noise_multiplier", "kind"} <= set(found[name])
        assert found[name]["epsilon"] <= 1.0
    assert found["certified"]["kind"] == "proven"
    assert found["certified"]["noise_multiplier"] == pytest.approx(1.947, abs=2e-3)
    paper = found["paper"]
    assert paper["kind"] == "heuristic"
    assert paper["noise_multiplier"] == pytest.approx(0.273, abs=5e-4)
    assert paper["step_epsilon"] == pytest.approx(0.3604, abs=5e-5)
    assert paper["step_delta"] == pytest.approx(2.5e-7, rel=1e-3)
    assert paper["unshuffled_noise_multiplier"] == pytest.approx(11.75, abs=5e-3)
    assert paper["falls_back"] is False
    assert found["certified_at_paper_noise"]["epsilon"] == pytest.approx(108.5, abs=0.5)
    assert found["target"]["num_steps"] == 500


def test_the_table_shows_kinds_and_what_is_proven_at_the_papers_noise() -> None:
    done = CliRunner().invoke(app, ["calibrate", "--epsilon", "1", *RUN, *PAPER])
    assert done.exit_code == 0
    for word in ("proven", "heuristic", "certified", "c'/c = 1", "σ0 = 11.75", "108.5"):
        assert word in done.stdout


def test_without_a_dimension_the_paper_is_left_out() -> None:
    assert run("--epsilon", "1", *RUN)["paper"] is None


def test_replace_one_is_certified_and_refused_by_the_rest() -> None:
    found = run("--epsilon", "1", *RUN, "--adjacency", "replace-one")
    assert found["certified"]["noise_multiplier"] > 3.0
    assert found["rdp"]["epsilon"] is None
    assert "replace-one" in found["rdp"]["refusal"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--epsilon", "1", *RUN, "--dimension", "1000"], "batch_clip"),
        (["--epsilon", "0", *RUN], "epsilon"),
        (["--epsilon", "1", *RUN[2:], "--delta", "1"], "delta"),
        (["--epsilon", "1", "--delta", "1e-5"], "sampling"),
        (["--epsilon", "1", *RUN, "--sampling-prob", "0.1", "--num-steps", "3"], "sampling"),
        (["--epsilon", "1", "--delta", "1e-5", "--num-steps", "3"], "sampling"),
        (
            ["--epsilon", "1", "--delta", "1e-5", "--sampling-prob", "2", "--num-steps", "3"],
            "sampling_prob",
        ),
        (
            ["--epsilon", "1", "--delta", "1e-5", "--sampling-prob", "0.1", "--num-steps", "0"],
            "num_steps",
        ),
    ],
)
def test_bad_input_is_one_line_and_status_two(arguments: list[str], named: str) -> None:
    done = CliRunner().invoke(app, ["calibrate", *arguments])
    assert done.exit_code == 2
    assert done.stderr.startswith(f"error: {named}")
    assert len(done.stderr.strip().splitlines()) == 1
