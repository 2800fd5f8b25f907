"""Small runs of the step benchmark, with pretended steps where only the order matters."""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from benchmarks.adapters import Setting
from benchmarks.workloads import workload

from benchmarks import apart, measure

ROOT = Path(__file__).resolve().parents[2]
# Steps that only write down who was called, on a model of one layer.
PRETENDED = """
import os, sys, time
import torch
from benchmarks import measure, step
calls = []
def build(adapter, model, setting):
    if adapter == "ours" and setting.workload.name == "bert-small-1x4":
        raise RuntimeError("ours is broken")
    if adapter == "ours:ghost" and setting.workload.name == "bert-small-2x4":
        time.sleep(30)
    def run(batch):
        if adapter == "opacus:hooks":
            raise torch.OutOfMemoryError("no memory left")
        calls.append(adapter)
    return run
class Workload:
    batch_size = 2
    def __init__(self, name):
        self.name = name
    def build(self):
        return torch.nn.Linear(2, 2)
    def batch(self, device):
        return {}
measure.build, step.workload = build, Workload
status = step.main()
print(" ".join(calls))
sys.exit(status)
"""


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python from the root, where the package of the benchmarks is found first."""
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, check=False, capture_output=True, text=True
    )


@pytest.mark.slow
def test_adapters_take_turns_in_every_round_after_all_are_prepared() -> None:
    done = python(
        "-c", PRETENDED, "--device", "cpu", "--workload", "bert-small-2x4", "--warmup", "2",
        "--rounds", "3", "--steps", "2", "--adapters", "plain", "ours", "opacus:ghost",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    calls = done.stdout.splitlines()[-1].split()
    names = ("plain", "ours", "opacus:ghost")
    prepared = [name for name in names for _ in range(3)]  # two to warm up, one for its memory
    # Two to lead in and one that is thrown away, then five for the host.
    alone = [name for name in names for _ in range(2 + 1 + 5)]
    rounds = [names[(place + number) % 3] for number in range(3) for place in range(3)]
    assert calls == [*prepared, *alone, *(name for name in rounds for _ in range(2 + 2))]


@pytest.mark.slow
def test_errors_are_recorded_and_only_ours_are_alarming(tmp_path: Path) -> None:
    path = tmp_path / "numbers.json"
    shared = (
        "-c", PRETENDED, "--device", "cpu", "--warmup", "0", "--rounds", "2", "--steps", "1",
        "--json", str(path),
    )  # fmt: skip
    theirs = python(*shared, "--workload", "bert-small-2x4", "--adapters", "plain", "opacus:hooks")
    assert theirs.returncode == 0, theirs.stderr
    assert "Traceback" not in theirs.stderr
    both = ("--workload", "bert-small-1x4", "bert-small-2x4", "--prepare-seconds", "5")
    ours = python(*shared, *both, "--adapters", "plain", "ours", "ours:ghost")
    assert ours.returncode == 1
    assert "Traceback" in ours.stderr
    assert "ours is broken" in ours.stderr
    document = json.loads(path.read_text())
    found = {(e["workload"], e["adapter"], e["run"]): e for e in document["measurements"]}
    first, second = document["runs"]
    assert "no memory left" in found["bert-small-2x4", "opacus:hooks", first]["error"]
    assert "ours is broken" in found["bert-small-1x4", "ours", second]["error"]
    assert "not prepared within 5 s" in found["bert-small-2x4", "ours:ghost", second]["error"]
    fine = found["bert-small-2x4", "ours", second]
    plain = found["bert-small-2x4", "plain", second]
    assert fine["round_ratios"]["plain"] == [
        theirs / mine
        for mine, theirs in zip(fine["block_seconds"], plain["block_seconds"], strict=True)
    ]
    assert len(plain["block_seconds"]) == 2


@pytest.mark.slow
def test_a_step_of_every_adapter_runs_on_a_cpu(tmp_path: Path) -> None:
    path = tmp_path / "numbers.json"
    once = ("--warmup", "0", "--rounds", "1", "--steps", "1", "--float32", "--device", "cpu")
    adapters = ("plain", "ours", "ours:ghost", "ours:instantiate", "opacus:ghost", "opacus:hooks")
    done = python(
        "-m", "benchmarks.step", "--workload", "bert-small-2x16", "--json", str(path), *once,
        "--adapters", *adapters,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(path.read_text())["measurements"]
    assert [entry["adapter"] for entry in found] == list(adapters)
    assert all(entry["error"] is None and entry["round_ratios"]["plain"] for entry in found)


@pytest.mark.slow
def test_adapters_apart_are_compared_round_by_round(tmp_path: Path) -> None:
    path = tmp_path / "numbers.json"
    done = python(
        "-m", "benchmarks.step", "--apart", "--device", "cpu", "--warmup", "0", "--rounds", "2",
        "--steps", "1", "--workload", "bert-small-2x16", "--json", str(path),
        "--adapters", "plain", "ours",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    document = json.loads(path.read_text())
    plain, ours = document["measurements"]
    assert ours["round_ratios"]["plain"] == [
        theirs / mine
        for mine, theirs in zip(ours["block_seconds"], plain["block_seconds"], strict=True)
    ]
    (run,) = document["runs"].values()
    assert run["routes"]["ours"]["taken"]["weighted sums"] == ["host"]
    assert "plain" not in run["routes"]


@pytest.mark.slow
def test_a_process_that_is_not_prepared_in_time_is_ended() -> None:
    cpu = torch.device("cpu")
    setting = Setting(workload=workload("bert-small-2x16"), device=cpu, bfloat16=False)
    contest = apart.ApartContest(setting, ["plain"])
    contest.prepare(warmup=10**6, limit_seconds=8.0)
    assert "not prepared within 8 s" in (contest.contestants[0].error or "")
    assert not contest._processes
    contest.close()


def test_what_goes_wrong_in_a_process_is_told_as_text(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("ours is broken")

    monkeypatch.setattr(measure, "prepare", broken)
    here, there = multiprocessing.Pipe()
    facts = ("bert-small-2x16", "cpu", False)
    serving = threading.Thread(target=apart.serve, args=(there, "ours", facts, "highest"))
    serving.start()
    cpu = torch.device("cpu")
    setting = Setting(workload=workload("bert-small-2x16"), device=cpu, bfloat16=False)
    contest = apart.ApartContest(setting, ["ours"])
    contest._pipes["ours"] = here
    with pytest.raises(apart.ApartError, match="RuntimeError: ours is broken"):
        contest._ask(contest.contestants[0], apart.PREPARE, 1)
    here.close()
    serving.join()
    there.close()
    with pytest.raises(apart.ApartError, match="has ended"):
        contest._ask(contest.contestants[0], apart.HOST)
