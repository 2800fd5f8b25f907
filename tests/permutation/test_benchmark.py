"""The shuffle benchmark runs, and its report says what was measured."""

from __future__ import annotations

import torch
from benchmarks.results import environment

from benchmarks import shuffle

TINY = {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 16}


def test_all_parts_are_measured_and_reported() -> None:
    cpu = torch.device("cpu")
    found = {
        "environment": environment(cpu, bfloat16=False),
        "matrix": shuffle.shuffle_matrix(cpu, 20, 1),
        "models": [shuffle.shuffle_model("gpt2", cpu, 1, TINY)],
        "temporary": {},
        "steps": [shuffle.share_of_step(cpu, 2, 4, blocks=1, steps=1, **TINY)],
    }
    assert found["models"][0]["shuffle_ratio"] == 1.0
    assert 0 < found["steps"][0]["ratio_alone"] < float("inf")
    report = shuffle.render(found)
    for expected in ("sparse matmul", "20 x 20", "| gpt2 |", "2x4", torch.__version__):
        assert expected in report
