"""The file of cells, and that a committed cell comes out again as it was recorded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from made_up import made_up

from shuffled_dpsgd.core.streams import STREAM_VERSION
from shuffled_dpsgd.errors import CheckpointError
from shuffled_dpsgd_experiments.frontier.cells import CellFile, point_of, run_cell
from shuffled_dpsgd_experiments.frontier.running import cells_of
from shuffled_dpsgd_experiments.frontier.workloads import WORKLOADS

ROOT = Path(__file__).parents[3]
WORKLOAD = WORKLOADS["digits"]
POINT = WORKLOAD.points()[0]


def test_cells_are_appended_and_never_changed(tmp_path: Path) -> None:
    file = CellFile(tmp_path / "cells.jsonl")
    first = made_up(WORKLOAD, POINT, seed=100)
    file.add(first)
    other = CellFile(file.path)
    other.add(made_up(WORKLOAD, POINT, seed=101))
    with pytest.raises(CheckpointError, match="never changed"):
        file.add(made_up(WORKLOAD, POINT, seed=101, score=0.99))
    assert [each["seed"] for each in file.read()] == [100, 101]
    assert file.find(first) == first


def test_a_half_written_line_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "cells.jsonl"
    CellFile(path).add(made_up(WORKLOAD, POINT, seed=100))
    with path.open("a") as file:
        file.write('{"workload": "dig')
    file = CellFile(path)
    assert len(file.read()) == 1
    file.add(made_up(WORKLOAD, POINT, seed=101))
    assert [json.loads(line)["seed"] for line in path.read_text().splitlines()] == [100, 101]


def test_a_damaged_line_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "cells.jsonl"
    path.write_text('{"seed": 1}\n')
    with pytest.raises(CheckpointError, match="no cell"):
        CellFile(path)


def test_a_committed_cell_comes_out_again() -> None:
    """Its noise, its first losses and its score; other processors may round the losses apart."""
    committed = cells_of(WORKLOAD, ROOT / "results").read()
    record = next(
        each
        for each in committed
        if each["stage"] == "figure" and each["batch_clip_ratio"] == 10.0 and each["seed"] == 100
    )
    assert record["streams"] == STREAM_VERSION
    again = run_cell(
        WORKLOAD,
        WORKLOAD.load(None),
        point_of(record),
        stage="figure",
        rate=record["learning_rate"],
        seed=record["seed"],
    )
    assert again is not None
    exact = ("data", "initial_weights", "settings", "noise_multipliers", "dimensions")
    assert {key: again[key] for key in exact} == {key: record[key] for key in exact}
    assert again["first_losses"] == pytest.approx(record["first_losses"], rel=1e-3)
    assert again["certified_epsilon"] == pytest.approx(record["certified_epsilon"], rel=1e-9)
    # Of 360 images, those on the edge between two classes may change sides.
    assert again["accuracy"]["test"] == pytest.approx(record["accuracy"]["test"], abs=5 / 360)


def test_every_committed_record_says_what_made_it() -> None:
    wanted = {
        "commit",
        "versions",
        "streams",
        "data",
        "initial_weights",
        "first_losses",
        "settings",
    }
    for path in sorted((ROOT / "results" / "frontier").glob("*.jsonl")):
        for record in CellFile(path).read():
            assert wanted <= record.keys()
            assert not record["commit"].endswith("changed")
            assert len(record["first_losses"]) == 5
