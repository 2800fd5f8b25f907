"""The cost model beside every eager private step that was measured on the H200."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.workloads import workload

from shuffled_dpsgd.scaling import GPUS, Job, ModelShapes, shapes_of
from shuffled_dpsgd.scaling.estimate import (
    STEP_BYTES_PER_PARAMETER,
    STEP_SECONDS,
    batch_seconds,
    memory_of,
)

ROOT = Path(__file__).resolve().parents[2]
REPORT = json.loads((ROOT / "benchmarks/reports/2026-11-15-h200.json").read_text())
STEPS = [
    m for m in REPORT["measurements"] if m["adapter"] in ("ours", "training") and m["error"] is None
]
H200 = GPUS["h200"]
# Updating 36 bytes per parameter is part of what the reports call `ours`.
UPDATE_BYTES = 36.0


def modelled(name: str) -> tuple[ModelShapes, int, int]:
    measured = workload(name)
    with torch.device("meta"):
        shapes = shapes_of(measured.build())
    return shapes, measured.batch_size, measured.length


def predicted(measurement: dict[str, Any]) -> tuple[float, float]:
    """Seconds of a step, and GiB at its peak."""
    shapes, batch, length = modelled(measurement["workload"])
    job = Job(gpus=1, length=length, logical_batch=batch, records=1, physical_batch=batch)
    seconds = batch_seconds(shapes, H200, batch=batch, length=length)
    if measurement["adapter"] == "training":
        seconds += STEP_SECONDS + STEP_BYTES_PER_PARAMETER * shapes.parameters / H200.bandwidth
    else:
        seconds += UPDATE_BYTES * shapes.parameters / H200.bandwidth
    return seconds, memory_of(shapes, job, batch=batch).peak / 2**30


def ratios() -> list[tuple[str, float, float]]:
    """(what, predicted over measured time, predicted over measured memory)."""
    found = []
    for one in STEPS:
        seconds, gib = predicted(one)
        measured = statistics.median(one["block_seconds"]) / one["steps"]
        name = f"{one['workload']} {one['adapter']}"
        found.append((name, seconds / measured, gib / one["step_peak_gib"]))
    return found


@pytest.fixture(scope="module")
def errors() -> list[tuple[str, float, float]]:
    return ratios()


def test_time_is_within_the_stated_error(errors: list[tuple[str, float, float]]) -> None:
    assert len(errors) >= 15
    for name, time, _ in errors:
        assert 0.85 <= time <= 1.30, (name, time)
    assert statistics.median(abs(time - 1) for _, time, _ in errors) < 0.07


def test_memory_is_within_the_stated_error(errors: list[tuple[str, float, float]]) -> None:
    for name, _, memory in errors:
        assert 0.95 <= memory <= 1.10, (name, memory)
    assert statistics.median(abs(memory - 1) for _, _, memory in errors) < 0.03
