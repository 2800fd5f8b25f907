"""Epoch times: both sides are timed in the same rounds; an epoch is extrapolated from steps."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest
import torch

from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd_experiments.exhibits import Request
from shuffled_dpsgd_experiments.tables import table8

TINY = table8.TimedModel(
    label="tiny", model="bert-tiny", dataset_size=10, length=6, physical_batch_size=2
)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr(table8, "BATCH_SIZE", 4)
    monkeypatch.setattr(table8, "SMALL", (TINY,))


def test_an_epoch_is_extrapolated_from_the_median_step(tiny: None, tmp_path: Path) -> None:
    found = table8.TABLE.reproduce(Request(output=tmp_path))
    assert found.written == (tmp_path / "table8_demo.json",)
    raw = json.loads(found.written[0].read_text())
    (row,) = raw["rows"]
    assert row["steps_per_epoch"] == 3
    for side, key in (("off", "unshuffled"), ("every-step", "shuffled")):
        assert len(row["step_seconds"][side]) == table8.FEWEST_ROUNDS
        median = statistics.median(row["step_seconds"][side])
        assert row[f"{key}_epoch_seconds"] == pytest.approx(3 * median)
    assert "extrapolated" in raw["epoch"]


def test_full_size_models_are_refused_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table8, "chosen_device", lambda name: torch.device("cpu"))
    with pytest.raises(InvalidArgumentError, match=r"--scale.*--from-results"):
        table8.run("paper")


def test_the_models_are_those_of_the_table() -> None:
    from shuffled_dpsgd_experiments.tables.printed import EPOCH_SECONDS

    assert {row.label for row in table8.MODELS} == set(EPOCH_SECONDS)
    assert all(table8.BATCH_SIZE % row.physical_batch_size == 0 for row in table8.MODELS)


@pytest.mark.parametrize(
    ("ratios", "words"),
    [
        ([0.9, 0.95], "too few rounds to tell (rounds from -10.0% to -5.0%)"),
        ([0.99, 1.0, 1.2], "no cost that can be told from the spread of timing"),
        ([1.01, 1.02, 1.03], "the printed share is within our spread"),
        ([1.001, 1.002, 1.003], "costs less than printed"),
        ([1.04, 1.05, 1.06], "costs more than printed"),
    ],
)
def test_a_verdict_says_nothing_that_the_spread_hides(ratios: list[float], words: str) -> None:
    row = {"label": "BERT, QNLI", "model": "bert-base", "steps_per_epoch": 108, "ratios": ratios}
    times = {"unshuffled_epoch_seconds": 1.0, "shuffled_epoch_seconds": 1.0}
    row |= times | {"ratio": statistics.median(ratios)}
    made = {"hardware": "x", "date": "today", "torch": "2"}
    raw = {"rows": [row], "batch_size": 1000, "precision": "x", "epoch": "y", "environment": made}
    shown = {one.what: one.verdict for one in table8.show(raw).rows}
    assert words in shown["BERT, QNLI"]
