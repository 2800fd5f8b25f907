"""The shuffle benchmark runs, and its report says what was measured."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
SMALL_RUN = """
import torch
from benchmarks import shuffle
from benchmarks.results import environment
tiny = {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 16}
cpu = torch.device("cpu")
found = {
    "environment": environment(cpu, bfloat16=False),
    "matrix": shuffle.shuffle_matrix(cpu, 20, 1),
    "models": [shuffle.shuffle_model("gpt2", cpu, 1, tiny)],
    "steps": [shuffle.share_of_step(cpu, 2, 4, blocks=1, steps=1, **tiny)],
}
assert found["models"][0]["shuffle_ratio"] == 1.0
assert 0 < found["steps"][0]["ratio_alone"] < float("inf")
print(shuffle.render(found))
"""


@pytest.mark.slow
def test_all_parts_are_measured_and_reported() -> None:
    run = subprocess.run(
        [sys.executable, "-c", SMALL_RUN], cwd=ROOT, check=False, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    for expected in ("sparse matmul", "20 x 20", "| gpt2 |", "2x4", torch.__version__):
        assert expected in run.stdout
