"""Records survive the file, torn lines and resumption."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from shuffled_dpsgd.errors import CheckpointError
from shuffled_dpsgd.reports.records import (
    NUM_NORM_BINS,
    MetricsLog,
    StepRecord,
    count_norms,
    norm_bin_edges,
)


def record(step: int, **measured: float) -> StepRecord:
    return StepRecord(step=step, batch_size=4, seconds=0.1, learning_rate=0.01, **measured)  # type: ignore[arg-type]


def test_records_round_trip(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    written = [
        record(1, loss=2.0),
        StepRecord(step=2, batch_size=0, seconds=0.2, learning_rate=0.1, norm_counts={3: 1, 40: 2}),
    ]
    for each in written:
        log.append(each)
    assert log.read() == written


def test_a_torn_last_line_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    log.append(record(1))
    with path.open("a") as file:
        file.write('{"step": 2, "batch')
    assert [each.step for each in log.read()] == [1]


def test_rewind_drops_what_is_repeated(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    for step in (1, 2, 3):
        log.append(record(step))
    log.rewind(1)
    log.append(record(2, loss=1.0))
    assert [(each.step, each.loss) for each in log.read()] == [(1, None), (2, 1.0)]


def test_rewinding_nothing_gives_an_empty_log(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.rewind(0)
    assert log.read() == []


def test_unknown_fields_are_refused() -> None:
    with pytest.raises(CheckpointError, match="surprise"):
        StepRecord.from_json(record(1).to_json() | {"surprise": 1})


def test_every_norm_is_counted_once_and_in_its_bin() -> None:
    norms = [0.0, 1e-9, 0.013, 1.0, 9.99, 1e9, math.inf, math.nan]
    counts = count_norms(norms)
    assert sum(counts.values()) == len(norms)
    assert all(0 <= index < NUM_NORM_BINS for index in counts)
    edges = norm_bin_edges()
    for norm in (0.013, 1.0, 9.99):
        ((index, _),) = count_norms([norm]).items()
        assert edges[index] <= norm * (1 + 1e-12)
        assert norm < edges[index + 1]
