"""The benchmark of whole runs: both sides do the same work, and the figures are those measured."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.run_side import Log, Setting
from benchmarks.run_tasks import RunTask
from torch import nn

from benchmarks import loop, run_side, run_tasks
from shuffled_dpsgd.integrations.per_sample_loss import classification_losses
from shuffled_dpsgd.tasks.tokens import TokenCollate, TokenRecords, class_labels
from training.cases import make_bert

RECORDS, LOGICAL, STEPS = 80, 16, 3

# The data of a benchmark are made, and rows may come twice.
pytestmark = pytest.mark.filterwarnings("ignore:the most frequent row")


def losses_of(model: nn.Module, batch: Any) -> torch.Tensor:
    inputs, labels = batch
    return classification_losses(model(**inputs).logits, labels)


def setting(*, pads: bool) -> Setting:
    data = TokenRecords([([1 + i % 7] * (2 + i % 9), i % 3) for i in range(RECORDS)])
    task = RunTask(
        data=data,
        collate=TokenCollate(pad_id=0, labels=class_labels),
        model=make_bert().train(),
        losses=losses_of,
    )
    return Setting(
        task=task, device=torch.device("cpu"), logical=LOGICAL, physical=8, steps=STEPS, pads=pads,
        compiled=False,
    )  # fmt: skip


@pytest.mark.parametrize("pads", [False, True])
@pytest.mark.parametrize("side", ["private", "plain"])
def test_every_step_of_a_side_is_taken_down(side: str, pads: bool) -> None:
    log = Log(started=time.time())
    chosen = setting(pads=pads)
    before = [p.detach().clone() for p in chosen.task.model.parameters()]
    facts = {"private": run_side.run_private, "plain": run_side.run_plain}[side](chosen, log)
    assert len(log.step_ends) == len(log.samples) == STEPS
    assert log.step_ends == sorted(log.step_ends)
    assert log.backwards == sum(log.shapes.values())
    assert {"data", "forward and backward", "update"} <= set(facts["seconds_by_part"])
    took = log.now() - log.loop_began
    assert sum(facts["seconds_by_part"].values()) == pytest.approx(took, rel=0.1, abs=0.05)
    after = chosen.task.model.parameters()
    assert all(not torch.equal(old, new) for old, new in zip(before, after, strict=True))


def test_the_figures_follow_from_the_times() -> None:
    found = {
        "loop_began": 2.0, "loop_ended": 12.0, "step_ends": [6.0, 8.0, 10.0, 12.0],
        "samples": [10, 20, 30, 40], "cpu_seconds": [5.0, 6.0, 6.5, 7.0],
        "backwards": 4, "shapes": {"8x8": 4},
        "seconds_by_part": {"data": 1.0, "update": 9.0},
    }  # fmt: skip
    result = loop.summarised(found)
    assert result["samples_per_second"] == 10.0
    assert result["samples_per_second_from_start"] == pytest.approx(100 / 12)
    assert result["samples_per_second_later"] == 70 / 4
    assert result["first_step_seconds"] == 4.0
    slow = result | {"samples_per_second": 5.0, "first_step_seconds": 6.5}
    text = loop.compared(slow, result)
    assert text.startswith(
        "0.50 of its speed, 1.00 after the beginning (1.00 by the time its cores"
    )
    assert result["samples_per_cpu_second_later"] == 70.0
    assert text.endswith("first step +2.5 s")
    assert "4 steps, 10 samples/s (18 after the beginning)" in loop.described(result)
    assert loop.described({"error": "Traceback\nOSError: no such file"}).endswith("such file")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--workload", "sst2"), "--data: expected a folder"),
        (("--workload", "images", "--logical", "0"), "expected at least 1"),
        (("--workload", "unknown"), "invalid choice"),
    ],
)
def test_what_cannot_be_run_is_refused(
    options: tuple[str, ...],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["loop", *options])
    with pytest.raises(SystemExit):
        loop.main()
    assert said in capsys.readouterr().err


def test_real_texts_keep_their_lengths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from shuffled_dpsgd.tasks.tokens import load_tokenizer

    (tmp_path / "sst2").mkdir()
    for split in ("train", "dev"):
        (tmp_path / "sst2" / f"{split}.tsv").write_text("sentence\tlabel\nhi\t1\nlonger\t0\n")
    monkeypatch.setattr(run_tasks, "load_tokenizer", lambda _: load_tokenizer("bert-tiny"))
    monkeypatch.setattr(run_tasks, "_classifier", lambda _: nn.Linear(1, 1))
    file = tmp_path / "records.npz"
    run_tasks.encode("sst2", tmp_path, tmp_path, file, None)
    task = run_tasks.build("sst2", file, tmp_path, None)
    assert [task.data[i] for i in range(2)] == [
        ([257, *b"hi", 258], 1),
        ([257, *b"longer", 258], 0),
    ]


@pytest.mark.slow
def test_both_sides_run_in_processes_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "loop.json"
    monkeypatch.setattr(
        sys, "argv",
        ["loop", "--workload", "images", "--records", "40", "--logical", "4", "--steps", "2",
         "--sides", "plain", "private", "--caches", "cold", "--device", "cpu", "--json", str(path)],
    )  # fmt: skip
    assert loop.main() == 0
    assert "images, cold: private / plain: " in capsys.readouterr().out
    written = json.loads(path.read_text())
    assert [result["side"] for result in written["results"]] == ["plain", "private"]
    assert all(len(result["step_ends"]) == 2 for result in written["results"])


@pytest.mark.parametrize("side", ["private", "plain"])
def test_a_run_ends_with_the_step_in_which_its_time_is_over(side: str) -> None:
    log = Log(started=time.time())
    chosen = replace(setting(pads=False), limit_seconds=0.0)
    facts = {"private": run_side.run_private, "plain": run_side.run_plain}[side](chosen, log)
    assert len(log.step_ends) == len(log.samples) == 1
    assert facts["seconds_by_part"]
