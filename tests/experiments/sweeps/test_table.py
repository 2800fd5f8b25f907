"""Sweeps whose cells generate texts: their metrics stand beside the score, and not in tuning."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shuffled_dpsgd_experiments.sweeps.grid import parse_sweep
from shuffled_dpsgd_experiments.sweeps.running import run_sweep
from shuffled_dpsgd_experiments.sweeps.table import read_records, rows_of, table_of

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
    assert run_sweep(sweep)
    (trial,) = read_records(sweep.results, "tuning")
    assert "generation" not in trial
    (cell,) = read_records(sweep.results)
    assert (cell["generation"]["split"], cell["generation"]["num_references"]) == ("test", 12)
    assert "BLEU" in table_of(sweep)
