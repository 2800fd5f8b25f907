"""The shuffle benchmark runs, and its report says what was measured."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "shuffle.py"
TINY = {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 16}


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("shuffle_benchmark", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_all_parts_are_measured_and_reported(benchmark: ModuleType) -> None:
    cpu = torch.device("cpu")
    found = {
        "environment": benchmark.environment(cpu),
        "matrix": benchmark.shuffle_matrix(cpu, 20, 1),
        "models": [benchmark.shuffle_model("gpt2", cpu, 1, TINY)],
        "temporary": {},
        "steps": [benchmark.share_of_step(cpu, 2, 4, blocks=1, steps=1, **TINY)],
    }
    assert found["models"][0]["shuffle_ratio"] == 1.0
    assert 0 < found["steps"][0]["ratio_alone"] < float("inf")
    report = benchmark.render(found)
    for expected in ("sparse matmul", "20 x 20", "| gpt2 |", "2x4", torch.__version__):
        assert expected in report
