"""The report's own arithmetic, on numbers made up."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

# Each draws its report in a process of its own.
pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
FACTS = {
    "date": "2020-01-01",
    "hardware": "a machine",
    "cpu_cores": 2,
    "torch_threads": 1,
    "python": "3",
    "versions": {"torch": "2"},
    "bfloat16_autocast": True,
}


def report(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.report", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)


def entry(run: str, adapter: str, seconds: list[float], **changed: Any) -> dict[str, Any]:
    return {
        "run": run,
        "workload": "gpt2-32x128",
        "adapter": adapter,
        "batch_size": 32,
        "steps": 2,
        "preparation_seconds": 1.0,
        "peak_gib": 10.0,
        "step_peak_gib": 10.0,
        "host_seconds": [0.1, 0.3, 0.2],
        "block_seconds": seconds,
        "round_ratios": {},
        "error": None,
        **changed,
    }


def write(path: Path, run: str, entries: list[dict[str, Any]], notes: list[str]) -> Path:
    path.write_text(json.dumps({"runs": {run: FACTS}, "notes": notes, "measurements": entries}))
    return path


def test_the_report_never_mixes_runs(tmp_path: Path) -> None:
    first = write(tmp_path / "first.json", "1", [
        entry("1", "plain", [1.0, 2.0, 1.0]),
        entry("1", "ours", [1.0, 2.5, 2.0], peak_gib=14.0,
              round_ratios={"plain": [1.0, 0.8, 0.5]}),
    ], ["A remark."])  # fmt: skip
    # A machine ten times slower: a ratio between the runs would show it.
    second = write(tmp_path / "second.json", "2", [
        entry("2", "plain", [10.0, 20.0]),
        entry("2", "ours", [10.0, 10.0], round_ratios={"plain": [1.0, 2.0],
                                                       "opacus:ghost": [4.0, 5.0]}),
        entry("2", "opacus:ghost", [40.0, 50.0], round_ratios={"plain": [0.25, 0.4]}),
        entry("2", "opacus:hooks", [], error="out of memory", peak_gib=None),
    ], [])  # fmt: skip
    done = report(first, second, "--output", tmp_path / "both.json")
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "both.md").read_text()
    assert (
        "| gpt2-32x128 | 0.80 (0.50–1.00) missed | – | 1.40 missed | – | 4.50 (4.00–5.00) |" in page
    )
    assert "| gpt2-32x128 | ours | 1 | 3 × 2 | 32.0 | 1000.00 | – | 200.00 |" in page
    assert "| gpt2-32x128 | opacus:ghost | 2 | 2 × 2 | 1.4 |" in page
    assert "failed: out of memory" in page
    assert "- A remark." in page
    assert (tmp_path / "both.svg").read_text().startswith("<svg")
    assert len(json.loads((tmp_path / "both.json").read_text())["measurements"]) == 6


def test_scaling_and_the_target_of_a_cpu_have_tables(tmp_path: Path) -> None:
    ours = {"plain": [0.5, 0.75, 0.5]}
    path = write(tmp_path / "all.json", "1", [
        entry("1", "plain", [1.0, 1.0, 1.0], workload="gpt2-4x4096", batch_size=4),
        entry("1", "ours", [2.0, 2.0, 2.0], workload="gpt2-4x4096", batch_size=4,
              round_ratios=ours),
        entry("1", "plain", [2.0], workload="gpt2-small-8x64", peak_gib=None,
              round_ratios={"opacus:ghost": [2.75]}),
        entry("1", "ours", [2.0], workload="gpt2-small-8x64", peak_gib=None,
              round_ratios={"opacus:ghost": [2.5]}),
    ], [])  # fmt: skip
    assert report(path).returncode == 0
    page = path.with_suffix(".md").read_text()
    assert "| 4096 | 4 | 8.0 | 4.0 | 0.50 (0.50–0.75) missed | 1.00 | 200.0 | 200.0 |" in page
    assert "| gpt2-small-8x64 | 2.50 (2.50–2.50) | 2.75 (2.75–2.75) | – | – |" in page


def test_numbers_without_runs_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "old.json"
    path.write_text(json.dumps({"measurements": []}))
    done = report(path)
    assert done.returncode == 1
    assert "measure again" in done.stderr
