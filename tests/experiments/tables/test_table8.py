"""Epoch times: both sides are timed in the same rounds; an epoch is extrapolated from steps."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest
import torch

from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd_experiments.tables import table8

TINY = table8.TimedModel(label="tiny", model="bert-tiny", dataset_size=10, length=6, physical=2)


@pytest.mark.slow
def test_an_epoch_is_extrapolated_from_the_median_step(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr(table8, "BATCH_SIZE", 4)
    found = table8.measure([TINY], torch.device("cpu"), rounds=3, warm_up=1)
    (row,) = found["rows"]
    assert row["steps_per_epoch"] == 3
    for side, key in (("off", "unshuffled"), ("every-step", "shuffled")):
        assert len(row["step_seconds"][side]) == 3
        median = statistics.median(row["step_seconds"][side])
        assert row[f"{key}_epoch_seconds"] == pytest.approx(3 * median)
    assert "extrapolated" in found["epoch"]


@pytest.mark.slow
def test_a_slow_model_is_timed_in_fewer_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr(table8, "BATCH_SIZE", 4)
    found = table8.time_model(TINY, torch.device("cpu"), rounds=5, warm_up=0, seconds=0.0)
    assert found["steps_timed"] == len(found["ratios"]) == table8.FEWEST_ROUNDS


def test_no_model_starts_when_time_is_up() -> None:
    found = table8.measure([TINY], torch.device("cpu"), stop_after=0.0)
    assert found["rows"] == []
    assert found["left_out"] == ["tiny"]


def test_the_command_writes_after_every_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr(table8, "BATCH_SIZE", 4)
    monkeypatch.setattr(table8, "SMALL", (TINY,))
    path = tmp_path / "results" / "table8.json"
    table8.main(["--small", "--rounds", "1", "--device", "cpu", "--json", str(path)])
    assert json.loads(path.read_text())["rows"][0]["label"] == "tiny"


def test_a_model_that_the_file_has_is_not_timed_again() -> None:
    device = torch.device("cpu")
    row = {"label": "tiny", "ratio": 1.25}
    made = {**table8.environment("cpu"), "date": "some other day"}
    before = {"environment": made, "rows": [row]}
    found = table8.measure([TINY], device, stop_after=0.0, before=before)
    assert (found["rows"], found["left_out"]) == ([row], [])
    before["environment"] = {**made, "hardware": "another machine"}
    found = table8.measure([TINY], device, stop_after=0.0, before=before)
    assert (found["rows"], found["left_out"]) == ([], ["tiny"])


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"rows": [{}], "environment": {}}'])
def test_a_file_of_something_else_is_refused_and_kept(text: str, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(InvalidArgumentError, match=r"--json.*move it away"):
        table8.main(["--small", "--device", "cpu", "--json", str(path)])
    assert path.read_text() == text


def test_the_models_are_those_of_the_table() -> None:
    from shuffled_dpsgd_experiments.tables.printed import EPOCH_SECONDS

    assert {row.label for row in table8.MODELS} == set(EPOCH_SECONDS)
    assert all(table8.BATCH_SIZE % row.physical == 0 for row in table8.MODELS)


@pytest.mark.parametrize(
    ("ratios", "words"),
    [
        ([0.9, 0.95], "too few rounds to tell (rounds from -10.0% to -5.0%)"),
        ([0.99, 1.0, 1.2], "no cost that can be told from the spread of timing"),
        ([1.01, 1.02, 1.03], "about as printed"),
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
    shown = {one.what: one.verdict for one in table8.exhibit(raw).rows}
    assert words in shown["BERT, QNLI"]
