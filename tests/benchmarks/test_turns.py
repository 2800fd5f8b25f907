"""Processes that are timed in turn: never two at once, never before all are there."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MEMBER = """
import sys, time
from pathlib import Path
from benchmarks.turns import Turns
folder, preparation, limit = Path(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
turns = Turns(folder=folder, total=2, limit_seconds=limit, poll_seconds=0.01)
with turns.taking_part():
    print("here", flush=True)
    time.sleep(preparation)
    if preparation < 0.1:
        raise RuntimeError("could not be prepared")
    prepared = time.monotonic()
    with turns.turn():
        start = time.monotonic()
        time.sleep(0.1)
        print(prepared, start, time.monotonic())
"""


def member(folder: Path, preparation: float, limit: float = 30.0) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", MEMBER, str(folder), str(preparation), str(limit)],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_one_at_a_time_and_nobody_before_all_are_prepared(tmp_path: Path) -> None:
    members = [member(tmp_path / "new", preparation) for preparation in (0.1, 0.3)]
    said = [process.communicate()[0].split()[1:] for process in members]
    prepared, starts, ends = zip(*(map(float, words) for words in said), strict=True)
    assert min(starts) >= max(prepared)
    assert max(starts) >= min(ends)


def test_a_failure_does_not_hold_up_the_others(tmp_path: Path) -> None:
    failing, other = member(tmp_path, 0.0), member(tmp_path, 0.2)
    assert "could not be prepared" in failing.communicate()[1]
    assert len(other.communicate()[0].split()) == 4
    assert (failing.returncode, other.returncode) == (1, 0)


def test_a_process_told_to_end_does_not_hold_up_the_others(tmp_path: Path) -> None:
    ended, other = member(tmp_path, 60.0), member(tmp_path, 0.2)
    assert ended.stdout is not None
    assert ended.stdout.readline() == "here\n"
    ended.terminate()
    assert len(other.communicate()[0].split()) == 4
    ended.communicate()
    assert (ended.returncode, other.returncode) == (128 + 15, 0)


def test_waiting_for_a_process_that_never_comes_ends(tmp_path: Path) -> None:
    start = time.monotonic()
    alone = member(tmp_path, 0.1, limit=0.3)
    assert "1 of 2 processes came" in alone.communicate()[1]
    assert alone.returncode == 1
    assert time.monotonic() - start < 20.0
