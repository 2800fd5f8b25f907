"""The step benchmark: pretended sides where only the order matters, small runs of real ones."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from benchmarks.step import Contest, SideError, Worker, planned, round_ratios

from benchmarks import report, step, worker

ROOT = Path(__file__).resolve().parents[2]


class Pretended:
    """A side that only writes down what it was asked, and fails at one question."""

    def __init__(self, name: str, asked: list[tuple[str, str]], fails_at: str = "") -> None:
        self.name, self.asked, self.fails_at = name, asked, fails_at

    def ask(self, question: str, *numbers: int, limit_seconds: float | None = None) -> Any:
        self.asked.append((self.name, question))
        if question == self.fails_at:
            raise SideError(f"{self.name} is broken")
        return {"prepare": {"peak_gib": 1.0}, "block": (0.5 * sum(numbers), 1.0)}.get(question, 1.0)

    def close(self) -> None:
        self.asked.append((self.name, "close"))


def test_sides_take_turns_in_every_round_after_all_are_prepared() -> None:
    asked: list[tuple[str, str]] = []
    names = ("plain", "ours", "opacus:ghost")
    contest = Contest({name: Pretended(name, asked) for name in names})
    contest.prepare(warmup=2, limit_seconds=None)
    contest.time(rounds=3, steps=2)
    alone = [(name, q) for name in names for q in ("block", *["host"] * step.HOST_STEPS)]
    rounds = [(names[(place + number) % 3], "block") for number in range(3) for place in range(3)]
    after = [(name, question) for name in names for question in ("busy", "calls")]
    assert asked == [*((name, "prepare") for name in names), *alone, *rounds, *after]
    assert contest.found["ours"]["block_seconds"] == [1.0, 1.0, 1.0]


def test_a_side_that_fails_is_left_out_and_only_competitors_may(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, broken = tmp_path / "numbers.json", {"opacus:hooks": "block"}

    def pretend(options: argparse.Namespace, name: str, side: str) -> Pretended:
        return Pretended(side, [], broken.get(side, ""))

    monkeypatch.setattr(step, "Worker", pretend)
    run = ["--workload", "bert-small-2x4", "--json", str(path), "--adapters"]
    assert step.main([*run, "plain", "opacus:hooks"]) == 0
    broken["ours"] = "prepare"
    assert step.main([*run, "plain", "ours"]) == 1
    assert "failed: ours is broken" in capsys.readouterr().out
    document = json.loads(path.read_text())
    found = {entry["adapter"]: entry for entry in document["measurements"]}
    assert found["opacus:hooks"]["error"] == "opacus:hooks is broken"
    assert found["ours"]["block_seconds"] == []
    assert found["plain"]["round_ratios"] == {"plain": [1.0] * 8}


def test_ratios_are_of_one_round() -> None:
    blocks = {"plain": [2.0, 6.0], "ours": [1.0, 2.0], "ours@before": [4.0]}
    assert round_ratios("ours", blocks) == {"plain": [2.0, 3.0], "ours@before": [4.0]}


def test_an_earlier_tree_runs_every_adapter_twice() -> None:
    options = step.arguments(
        ["--workload", "gpt2-1x8", "--adapters", "ours", "--before", str(ROOT)]
    )
    assert planned(options) == {"gpt2-1x8": ["ours", "ours@before", "ours@before again"]}


def test_a_folder_that_is_no_tree_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        step.arguments(["--before", str(tmp_path), "--workload", "x"])
    assert "--before: expected a tree of this project" in capsys.readouterr().err


def test_what_goes_wrong_in_a_process_is_told_as_text() -> None:
    class Broken:
        def prepare(self, warmup: int) -> None:
            raise RuntimeError(f"ours is\nbroken after {warmup}")

    here, there = multiprocessing.Pipe()
    serving = threading.Thread(
        target=worker.serve, args=(there, Broken()), kwargs={"is_competitor": True}
    )
    serving.start()
    here.send(("prepare", (3,)))
    assert here.recv() == (True, "RuntimeError: ours is broken after 3")
    here.close()
    serving.join()
    there.close()


def test_a_process_that_is_not_ready_in_time_is_ended() -> None:
    options = step.arguments(["--workload", "bert-small-2x16", "--device", "cpu"])
    side = Worker(options, "bert-small-2x16", "plain")
    with pytest.raises(SideError, match="no answer within 0 s"):
        side.ask("prepare", 10**6, limit_seconds=0.01)
    with pytest.raises(SideError, match="has ended"):
        side.ask("host")
    side.close()


def test_busy_time_counts_overlaps_once_and_nothing_but_work() -> None:
    spans = [("kernel", 0, 10), ("gpu_memcpy", 5, 10), ("kernel", 6, 2), ("kernel", 30, 1)]
    events = [{"cat": cat, "ts": begin, "dur": length} for cat, begin, length in spans]
    events += [{"cat": "gpu_user_annotation", "ts": 0, "dur": 100}, {"ph": "M"}]
    assert worker.busy_time(events) == 16


def measured(path: Path, *options: str) -> dict[str, Any]:
    """Real sides on a tiny batch, each in a process of its own; what the command wrote."""
    command = [
        sys.executable, "-m", "benchmarks.step", "--workload", "bert-small-2x16", "--device", "cpu",
        "--warmup", "0", "--rounds", "2", "--steps", "1", "--json", str(path), *options,
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(path.read_text())
    return found


@pytest.mark.slow
def test_a_step_of_every_adapter_runs_on_a_cpu(tmp_path: Path) -> None:
    adapters = [
        "plain", "ours", "ours:ghost", "ours:instantiate", "training", "opacus:ghost",
        "opacus:hooks",
    ]  # fmt: skip
    document = measured(tmp_path / "numbers.json", "--adapters", *adapters)
    found = {entry["adapter"]: entry for entry in document["measurements"]}
    assert list(found) == adapters
    for entry in found.values():
        assert entry["error"] is None
        assert entry["round_ratios"].keys() == {"plain", "opacus:ghost"}
        assert entry["peak_gib"] > 0
        assert entry["python_calls"] > 0
    assert found["ours"]["backends"]["taken"]["weighted sums"] == ["host"]
    (facts,) = document["runs"].values()
    assert facts["versions"]["torch"]


@pytest.mark.slow
def test_two_states_of_the_code_are_compared(tmp_path: Path) -> None:
    """Here both are this one."""
    options = ("--before", str(ROOT), "--adapters", "ours")
    document = measured(tmp_path / "numbers.json", *options)
    for entry in document["measurements"]:
        assert entry["error"] is None
        assert len(entry["round_ratios"]["ours@before"]) == 2


ENTRY = {
    "workload": "gpt2-32x128", "adapter": "ours", "steps": 2, "peak_gib": 10.0,
    "host_seconds": [0.1, 0.3, 0.2], "block_seconds": [1.0, 2.5, 2.0], "error": None,
    "round_ratios": {"plain": [1.0, 0.8, 0.5]},
}  # fmt: skip


def test_the_report_has_medians_and_ranges() -> None:
    broken = {**ENTRY, "adapter": "opacus:hooks", "error": "out | of memory"}
    lines = report.table([ENTRY, broken]).splitlines()
    assert "| gpt2-32x128 | ours | 3 × 2 | 1000.00 |  | 200.00 |  |  | 10.00 |" in lines[2]
    assert lines[2].endswith("| plain 0.80 (0.50 to 1.00) |")
    assert lines[3] == "| gpt2-32x128 | opacus:hooks | failed: out / of memory |"


def test_numbers_of_another_benchmark_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "old.json"
    path.write_text(json.dumps({"runs": {}}))
    with pytest.raises(SystemExit, match="no measurements"):
        report.load(path)
