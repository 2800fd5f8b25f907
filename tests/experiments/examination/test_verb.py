"""`examine`: claim against truth, printed and as JSON."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from shuffled_dpsgd.cli.main import app

RUN = ["--delta", "5e-6", "--sampling-prob", "0.02", "--num-steps", "500"]
SMALL = [*RUN, "--dimension", "10000", "--batch-clip", "1", "--draws", "2000"]


def test_the_claim_is_refuted_in_json() -> None:
    done = CliRunner().invoke(app, ["examine", "--epsilon", "1", *SMALL, "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["verdict"] == "claim refuted"
    assert [each["pair"] for each in found["examinations"]] == ["spike", "constant"]
    assert found["claim"]["kind"] == "heuristic"
    assert found["certified"]["kind"] == "proven"
    assert found["certified"]["epsilon"] > 20.0
    spike = found["examinations"][0]
    assert all(each["kind"] == "measured" and each["low"] > 0.5 for each in spike["truth"])


def test_the_table_says_refuted_and_what_is_proven() -> None:
    done = CliRunner().invoke(app, ["examine", "--noise-multiplier", "0.38", *SMALL])
    assert done.exit_code == 0, done.output
    for word in ("claim refuted", "measured", "heuristic", "proven", "P‖Q", "Q‖P"):
        assert word in done.stdout


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([*SMALL], "epsilon"),
        (["--epsilon", "1", "--noise-multiplier", "1", *SMALL], "epsilon"),
        (["--noise-multiplier", "0", *SMALL], "noise_multiplier"),
        (["--epsilon", "1", *RUN, "--dimension", "1", "--batch-clip", "1"], "dimension"),
    ],
)
def test_bad_input_is_one_line_and_status_two(arguments: list[str], named: str) -> None:
    done = CliRunner().invoke(app, ["examine", *arguments])
    assert done.exit_code == 2
    assert done.stderr.startswith(f"error: {named}")


def test_the_batch_clip_is_required() -> None:
    done = CliRunner().invoke(app, ["examine", "--epsilon", "1", *RUN, "--dimension", "100"])
    assert done.exit_code == 2
    assert "batch-clip" in done.stderr
