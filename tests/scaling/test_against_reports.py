"""The cost model beside every eager private step that was measured on the H200."""

from __future__ import annotations

import functools
import json
import statistics
from pathlib import Path

import pytest
import torch
from benchmarks.workloads import workload

from shuffled_dpsgd.scaling import GPUS, Job, ModelShapes, shapes_of
from shuffled_dpsgd.scaling.estimate import (
    MEMORY_ERROR,
    STEP_BYTES_PER_PARAMETER,
    STEP_SECONDS,
    TIME_ERROR,
    batch_seconds,
    memory_of,
)

REPORTS = Path(__file__).resolve().parents[2] / "benchmarks/reports"
FITTED = "2026-11-15-h200.json"
# The same and one more workload on other hosts, before and after other changes of the code.
OTHERS = (
    "2026-11-15-h200-narrow-blocks.json",
    "2026-11-16-h200-rooms.json",
    "2026-11-16-h200-sharded.json",
)
H200 = GPUS["h200"]
# Updating 36 bytes per parameter is part of what the reports call `ours`.
UPDATE_BYTES = 36.0

Ratio = tuple[str, float, float]


def steps(report: str) -> list[tuple[str, str, float, float]]:
    """(workload, adapter, seconds, GiB) of every eager private step in a report."""
    found = []
    for one in json.loads((REPORTS / report).read_text())["measurements"]:
        if one["adapter"] not in ("ours", "training") or one.get("error") is not None:
            continue
        if "after_ms" in one:
            seconds, gib = statistics.median(one["after_ms"]) / 1000, one["after_peak_gib"]
        else:
            seconds = statistics.median(one["block_seconds"]) / one["steps"]
            gib = one["step_peak_gib"]
        found.append((one["workload"], one["adapter"], seconds, gib))
    return found


@functools.cache
def modelled(name: str) -> tuple[ModelShapes, int, int]:
    measured = workload(name)
    with torch.device("meta"):
        shapes = shapes_of(measured.build())
    return shapes, measured.batch_size, measured.length


def predicted(name: str, adapter: str) -> tuple[float, float]:
    """Seconds of a step, and GiB at its peak."""
    shapes, batch, length = modelled(name)
    job = Job(gpus=1, length=length, logical_batch=batch, records=1, physical_batch=batch)
    seconds = batch_seconds(shapes, H200, batch=batch, length=length)
    if adapter == "training":
        seconds += STEP_SECONDS + STEP_BYTES_PER_PARAMETER * shapes.parameters / H200.bandwidth
    else:
        seconds += UPDATE_BYTES * shapes.parameters / H200.bandwidth
    return seconds, memory_of(shapes, job, batch=batch).peak / 2**30


def ratios(report: str) -> list[Ratio]:
    """(what, predicted over measured time, predicted over measured memory)."""
    found = []
    for name, adapter, measured_seconds, measured_gib in steps(report):
        seconds, gib = predicted(name, adapter)
        found.append((f"{name} {adapter}", seconds / measured_seconds, gib / measured_gib))
    return found


def median_error(values: list[float]) -> float:
    return statistics.median(abs(value - 1.0) for value in values)


def test_what_the_model_was_fitted_to() -> None:
    found = ratios(FITTED)
    assert len(found) == 19
    for name, time, memory in found:
        assert 0.87 <= time <= 1.30, (name, time)
        assert 0.95 <= memory <= 1.09, (name, memory)
    assert median_error([time for _, time, _ in found]) < 0.05
    assert median_error([memory for _, _, memory in found]) < 0.025


@pytest.mark.parametrize("report", OTHERS)
def test_what_the_model_was_not_fitted_to(report: str) -> None:
    found = ratios(report)
    assert found
    for name, time, memory in found:
        assert 0.84 <= time <= 1.5, (name, time)
        assert 0.94 <= memory <= 1.09, (name, memory)


def test_the_errors_that_are_stated_are_the_largest_ones() -> None:
    found = [one for report in (FITTED, *OTHERS) for one in ratios(report)]
    assert max(abs(time - 1.0) for _, time, _ in found) == pytest.approx(TIME_ERROR, abs=0.005)
    assert max(abs(memory - 1.0) for *_, memory in found) == pytest.approx(MEMORY_ERROR, abs=0.005)
