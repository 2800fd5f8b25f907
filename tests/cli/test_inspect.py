"""`inspect` counts what moves, for names and for saved models, and says no in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from typer.testing import CliRunner

from shuffled_dpsgd.cli.main import app


def run(*arguments: str) -> dict[str, Any]:
    done = CliRunner().invoke(app, ["inspect", *arguments, "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


@pytest.mark.parametrize(("model", "number"), [("gpt2", 124_439_808), ("opt-125m", 125_239_296)])
def test_language_models_move_entirely_in_full_scope(model: str, number: int) -> None:
    found = run("--model", model, "--scope", "full")
    assert found["total_parameters"] == found["moved_parameters"] == number
    assert found["shuffle_ratio"] == 1.0
    assert found["log10_group_order"] > 1e5
    assert found["unmoved"] == {}
    assert {group["kind"] for group in found["groups"]} == {
        "mlp-hidden",
        "query-key",
        "value-output",
        "heads",
        "residual",
    }


@pytest.mark.parametrize(
    ("model", "percent"), [("vit-base", 99), ("bert-base", 78), ("roberta-base", 69), ("gpt2", 68)]
)
def test_the_paper_scope_moves_less_than_everything(model: str, percent: int) -> None:
    assert round(100 * run("--model", model, "--scope", "paper")["shuffle_ratio"]) == percent


@pytest.mark.parametrize("model", ["vit-base", "bert-base", "roberta-base", "distilbert-base"])
def test_classifiers_move_but_for_the_bias_over_classes(model: str) -> None:
    found = run("--model", model, "--scope", "full", "--num-labels", "5")
    assert found["total_parameters"] - found["moved_parameters"] == 5
    (reason,) = found["unmoved"].values()
    assert "classes" in reason


def test_a_saved_model_is_read_from_its_directory(tmp_path: Path) -> None:
    config = transformers.GPT2Config(
        n_embd=12, n_layer=1, n_head=2, vocab_size=20, n_positions=8, bos_token_id=1, eos_token_id=1
    )
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    found = run("--model", str(tmp_path), "--scope", "full")
    assert found["shuffle_ratio"] == 1.0
    assert found["total_parameters"] < 5_000


def test_tables_name_kinds_ratio_and_reasons() -> None:
    done = CliRunner().invoke(app, ["inspect", "--model", "bert-base"], env={"COLUMNS": "120"})
    assert done.exit_code == 0
    for expected in ("query-key", "shuffle ratio 78.", "Theorems 1-2"):
        assert expected in done.stdout


def test_an_unknown_name_is_one_line_and_status_two() -> None:
    done = CliRunner().invoke(app, ["inspect", "--model", "no-such-model"])
    assert done.exit_code == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert "vit-base" in done.stderr


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ("{oops", "valid JSON"),
        ("[1, 2]", "model_type"),
        ('{"model_type": "nonesuch", "architectures": ["Nonesuch"]}', "nonesuch"),
        ('{"model_type": "gpt2"}', "architecture"),
    ],
    ids=["torn", "no object", "foreign", "no architecture"],
)
def test_a_directory_that_holds_no_model_is_one_line_and_status_two(
    tmp_path: Path, config: str, reason: str
) -> None:
    (tmp_path / "config.json").write_text(config)
    done = CliRunner().invoke(app, ["inspect", "--model", str(tmp_path)])
    assert done.exit_code == 2
    assert done.stderr.startswith("error: model: expected")
    assert reason in done.stderr


def test_an_empty_name_is_no_model() -> None:
    done = CliRunner().invoke(app, ["inspect", "--model", ""])
    assert done.exit_code == 2
    assert "expected one of" in done.stderr


def test_classes_of_a_language_model_are_refused_not_ignored() -> None:
    done = CliRunner().invoke(app, ["inspect", "--model", "gpt2", "--num-labels", "5"])
    assert done.exit_code == 2
    assert "num_labels: expected a model that classifies, got 'GPT2LMHeadModel'" in done.stderr


def test_names_of_what_stays_are_written_out() -> None:
    done = CliRunner().invoke(app, ["inspect", "--model", "bert-base", "--unmoved"])
    shown = "".join(line.split("│")[2].strip() for line in done.stdout.splitlines() if "│" in line)
    assert "bert.encoder.layer.11.attention.output.LayerNorm.weight" in shown
