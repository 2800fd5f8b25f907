"""Sweeps whose cells generate texts: their metrics stand beside the score, and not in tuning."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shuffled_dpsgd.errors import CheckpointError
from shuffled_dpsgd_experiments.sweeps.cell import Tasks
from shuffled_dpsgd_experiments.sweeps.grid import Cell
from shuffled_dpsgd_experiments.sweeps.reading import parse_sweep
from shuffled_dpsgd_experiments.sweeps.running import run_sweeps
from shuffled_dpsgd_experiments.sweeps.store import read_records
from shuffled_dpsgd_experiments.sweeps.table import rows_of, table_of

RUN = {
    "task": "causal-lm",
    "model": {"name": "gpt2-tiny"},
    "data": {"format": "e2e", "path": "absent"},
    "privacy": {"delta": 1e-5, "clip_norm": 1.0},
    "training": {"expected_batch_size": 4, "num_steps": 2},
}


def record(seed: int, **texts: float) -> dict[str, Any]:
    claim = {"epsilon": 8.0, "kind": "proven"}
    found = {"method": "plain", "epsilon": 8.0, "seed": seed, "score_name": "perplexity"}
    found |= {"tuned": {}}
    return found | {"score": 3.0 + seed, "certified": claim, "paper": None, "generation": texts}


def test_metrics_of_texts_are_means_over_seeds(tmp_path: Path) -> None:
    records = [record(0, bleu=20.0, rouge_l=0.5), record(1, bleu=30.0, rouge_l=0.7)]
    (row,) = rows_of(records)
    assert row.to_json()["texts"] == {"bleu": 25.0, "rouge_l": 0.6}
    for one in records:
        (tmp_path / f"main_plain_{one['seed']}.json").write_text(json.dumps(one))
    sweep = parse_sweep(
        {"name": "x", "epsilons": [8.0], "seeds": [0], "run": RUN, "methods": [{"name": "plain"}]},
        results=tmp_path,
    )
    lines = table_of(sweep).splitlines()
    assert "| perplexity | BLEU | ROUGE-L | certified" in lines[2]
    assert "| 25 | 0.6 |" in lines[4]
    assert len({line.count("|") for line in lines[2:5]}) == 1


def test_a_seed_without_texts_leaves_the_metrics_out() -> None:
    other = record(1)
    del other["generation"]
    (row,) = rows_of([record(0, bleu=20.0), other])
    assert "texts" not in row.to_json()


def configured(seed: int, score: float | None, **training: int) -> dict[str, Any]:
    """A result that says what it was run with."""
    return record(seed) | {"score": score, "config": {"training": training}}


def test_results_of_other_settings_are_never_averaged() -> None:
    short = [configured(seed, 2.0 + seed, num_steps=3) for seed in (0, 1)]
    long = [configured(0, 7.0, num_steps=4, evaluate_every=20)]
    rows = {row.name: row for row in rows_of([*short, *long])}
    assert rows["plain (num_steps 3)"].scores == (2.0, 3.0)
    assert rows["plain (num_steps 4)"].scores == (7.0,)
    # A key that has its default is the same as one that is not there.
    (same,) = rows_of([*short, configured(2, 4.0, num_steps=3, evaluate_every=20)])
    assert (same.name, len(same.scores)) == ("plain", 3)


def test_a_run_without_a_score_is_counted() -> None:
    (row,) = rows_of([configured(0, 2.0), configured(1, None)])
    assert row.describe() == "2.00 (n = 1, 1 without a finite score)"
    (lost,) = rows_of([configured(0, None)])
    assert lost.describe() == "none (1 without a finite score)"
    assert lost.to_json()["mean"] is None


def test_a_folder_with_results_of_another_file_is_drawn_and_said(tmp_path: Path) -> None:
    (tmp_path / "main_plain_eps8_seed0_00000000.json").write_text(json.dumps(record(0, bleu=1.0)))
    raw = {"name": "x", "epsilons": [8.0], "seeds": [0], "run": RUN, "methods": [{"name": "new"}]}
    text = table_of(parse_sweep(raw, results=tmp_path))
    assert "| 8 | plain | 3.00 (n = 1) |" in text
    assert "1 of 1 results are no cells of this file as it stands" in text


@pytest.mark.parametrize("content", ['{"score"', '{"score": 1.0}', "[]"])
def test_a_damaged_result_is_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "main_plain_eps8_seed0_00000000.json"
    path.write_text(content)
    with pytest.raises(CheckpointError, match=f"{path}: not a cell's result"):
        read_records(tmp_path)


def test_settings_that_are_words_can_be_tuned(tmp_path: Path) -> None:
    raw = {"name": "x", "epsilons": [8.0], "seeds": [0], "run": RUN}
    raw["methods"] = [{"name": "plain", "tuning": {"optimizer.schedule": ["linear", "cosine"]}}]
    raw["tuning"] = {"epsilon": 8.0, "run": {}}
    sweep = parse_sweep(raw, results=tmp_path)
    said: list[str] = []

    def run(cell: Cell, tasks: Tasks) -> dict[str, Any]:
        return record(0) | {"tuned": dict(cell.tuned)}

    assert run_sweeps([sweep], run=run, on_progress=lambda p: said.append(p.describe()))
    assert "schedule cosine" in said[1]
    assert "| plain | schedule linear | 3 |" in table_of(sweep)


@pytest.mark.slow
def test_cells_write_texts_and_tuning_does_not(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    for name in ("trainset", "devset", "testset_w_refs"):
        rows = [f"food[{i // 2}],It serves {i}." for i in range(12)]
        (tmp_path / f"{name}.csv").write_text("\n".join(["mr,ref", *rows]))
    run = RUN | {
        "data": {"format": "e2e", "path": str(tmp_path), "max_length": 48},
        "generation": {"split": "test", "max_new_tokens": 2, "bleu": "plain"},
    }
    method = {"name": "plain", "tuning": {"optimizer.learning_rate": [1e-3]}}
    tuning = {"epsilon": 8.0, "run": {"data": {"heldout_from_train": 4}}}
    raw = {"name": "x", "epsilons": [8.0], "seeds": [0], "run": run, "methods": [method]}
    sweep = parse_sweep(raw | {"tuning": tuning}, results=tmp_path / "results")
    assert run_sweeps([sweep])
    (trial,) = read_records(sweep.results, "tuning")
    assert "generation" not in trial
    (cell,) = read_records(sweep.results)
    assert (cell["generation"]["split"], cell["generation"]["num_references"]) == ("test", 12)
    assert "BLEU" in table_of(sweep)
