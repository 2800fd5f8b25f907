"""The benchmark of whole loops times both of them, and refuses what it cannot run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
QUICK = ("--blocks", "2", "--steps", "2", "--device", "cpu")


def loop(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.loop", *options],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_both_loops_are_timed_in_turn(tmp_path: Path) -> None:
    path = tmp_path / "loop.json"
    done = loop("--workload", "bert-small-3x4", "--logical", "8", *QUICK, "--json", str(path))
    assert done.returncode == 0, done.stderr
    assert "bert-small-3x4, batches of 8: private at" in done.stdout
    written = json.loads(path.read_text())
    assert written["environment"]["bfloat16_autocast"] is False
    assert {name: len(blocks) for name, blocks in written["seconds_per_record"].items()} == {
        "private": 2,
        "plain": 2,
    }
    assert all(s > 0 for blocks in written["seconds_per_record"].values() for s in blocks)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--workload", "vit-base-2x197"), "expected a model of text"),
        (("--workload", "bert-small-3x4", "--logical", "0"), "expected at least 1"),
    ],
)
def test_what_cannot_be_run_is_refused(options: tuple[str, ...], said: str) -> None:
    done = loop(*options, *QUICK)
    assert done.returncode == 2
    assert said in done.stderr
