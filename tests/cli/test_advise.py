"""The advise verb and the dry run: a verdict from public numbers, and nothing written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from shuffled_dpsgd.cli.main import app

NUMBERS = ["--epsilon", "8", "--delta", "1e-5", "--dataset-size", "2000", "--batch-size", "128"]


def run(*arguments: object, code: int = 0) -> Any:
    result = CliRunner().invoke(app, list(map(str, arguments)))
    assert result.exit_code == code, result.output
    return result


@pytest.mark.slow
def test_a_hopeless_plan_is_called_so_with_what_it_would_take() -> None:
    plan = [*NUMBERS, "--epochs", "3", "--dimension", "22700000"]
    said = " ".join(run("advise", *plan).stdout.split())
    assert said.startswith("hopeless")
    assert "records instead of 2,000" in said
    assert "trainable parameters instead of 22,700,000" in said
    advice = json.loads(run("advise", *plan, "--json").stdout)
    assert advice["plan"]["verdict"] == "hopeless"
    assert advice["needed_alone"]["dataset_size"] > 2000


def test_a_dry_run_advises_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("sklearn")
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    # Under torchrun every rank is asked, and the first one answers.
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert run("train", "digits", "--dry-run", "--json").stdout == ""
    monkeypatch.setenv("RANK", "0")
    advice = json.loads(run("train", "digits", "--dry-run", "--json").stdout)
    assert advice["plan"]["verdict"] == "promising"
    assert 1e-3 < advice["suggested"]["learning_rate"] < 1e-1
    assert advice["suggested"]["clip_norm"] == 1.0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "--epsilon"),
        (NUMBERS, "--epochs"),
        ([*NUMBERS, "--epochs", "1", "--dimension", "0"], "dimension"),
        ([*NUMBERS, "--epochs", "-1", "--dimension", "10"], "epochs"),
    ],
)
def test_half_a_plan_is_refused(arguments: list[str], expected: str) -> None:
    assert expected in run("advise", *arguments, code=2).stderr
