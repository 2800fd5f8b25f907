"""The benchmark's own arithmetic, and one small run of it from the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

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


def run(*arguments: str) -> None:
    """Run a benchmark module from the root, where its package is found first."""
    subprocess.run([sys.executable, "-m", *arguments], cwd=ROOT, check=True, capture_output=True)


def entry(adapter: str, seconds: float, peak_gib: float) -> dict[str, Any]:
    return {
        "workload": "gpt2-32x128",
        "adapter": adapter,
        "batch_size": 32,
        "block_seconds": [seconds, 3 * seconds, 0.9 * seconds],
        "peak_gib": peak_gib,
        "error": None,
        "samples_per_second": 32 / seconds,
    }


def test_the_report_says_what_was_missed(tmp_path: Path) -> None:
    entries = [
        entry("plain", 0.8, 10.0),
        entry("ours", 1.0, 14.0),
        entry("opacus:ghost", 4.0, 12.0),
    ]
    failed = {**entry("opacus:hooks", 1.0, 1.0), "block_seconds": [], "error": "out of memory"}
    path = tmp_path / "numbers.json"
    document = {"environment": FACTS, "notes": ["A remark."], "measurements": [*entries, failed]}
    path.write_text(json.dumps(document))
    run("benchmarks.report", str(path))
    page = path.with_suffix(".md").read_text()
    assert "| gpt2-32x128 | 0.80 (missed) | – | 1.40 (missed) | 4.00 |" in page
    assert "failed: out of memory" in page
    assert "- A remark." in page
    assert path.with_suffix(".svg").read_text().startswith("<?xml")


@pytest.mark.slow
def test_a_step_of_every_adapter_runs_on_a_cpu(tmp_path: Path) -> None:
    path = tmp_path / "numbers.json"
    once = ("--warmup", "0", "--blocks", "1", "--steps", "1", "--float32", "--device", "cpu")
    adapters = ("plain", "ours", "ours:ghost", "ours:instantiate", "opacus:ghost", "opacus:hooks")
    run("benchmarks.step", "--workload", "bert-small-2x16", "--json", str(path), *once,
        "--adapters", *adapters)  # fmt: skip
    found = json.loads(path.read_text())["measurements"]
    assert [entry["adapter"] for entry in found] == list(adapters)
    assert all(entry["error"] is None and entry["samples_per_second"] > 0 for entry in found)
