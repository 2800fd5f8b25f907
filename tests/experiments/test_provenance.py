"""Every record can be tied to the code that made it, and a cell run again is the same cell."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from torch import nn

from shuffled_dpsgd.core.streams import STREAM_VERSION
from shuffled_dpsgd_experiments.exhibits import Request, in_one_file
from shuffled_dpsgd_experiments.provenance import FIRST_STEPS, Provenance, weights_digest
from shuffled_dpsgd_experiments.sweeps import load_sweep
from shuffled_dpsgd_experiments.sweeps.cell import Tasks, run_cell

ROOT = Path(__file__).parents[2]
TIED = {"commit", "streams", "data", "initial_weights", "first_losses"}


def test_losses_of_the_first_steps_alone_are_kept() -> None:
    model = nn.Linear(2, 1)
    provenance = Provenance(model, "data")
    for step in range(FIRST_STEPS + 2):
        progress: Any = SimpleNamespace(metrics=SimpleNamespace(loss=step or None))
        provenance(progress)
    found = provenance.to_json()
    assert found["first_losses"] == [1, 2, 3, 4, 5]
    assert (found["streams"], found["data"]) == (STREAM_VERSION, "data")
    assert found["initial_weights"] == weights_digest(model)
    nn.init.zeros_(model.weight)
    assert found["initial_weights"] != weights_digest(model)


def test_records_without_a_commit_are_marked_as_of_which_code() -> None:
    marked = json.loads((ROOT / "results" / "code.json").read_text(encoding="utf-8"))["records"]
    for path in sorted((ROOT / "results").glob("*/*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        known = {name for names in marked.get(path.parent.name, {}).values() for name in names}
        if "commit" not in record:
            assert {path.stem, path.stem.rsplit("_", 1)[-1]} & known, path
        else:
            assert record.keys() >= TIED, path
            assert not record["commit"].endswith("changed"), path


def test_results_that_are_no_cells_are_marked_as_well() -> None:
    marked = json.loads((ROOT / "results" / "code.json").read_text(encoding="utf-8"))["files"]
    known = {name for names in marked.values() for name in names}
    for path in sorted((ROOT / "results").glob("*.json")):
        text = path.read_text(encoding="utf-8")
        commits = set(re.findall(r'"([0-9a-f]{40}(?:-changed)?)"', text))
        assert not any(each.endswith("changed") for each in commits), path
        assert commits or path.name in {*known, "code.json", "checks.json"}, path


def test_what_is_written_names_its_commit(tmp_path: Path) -> None:
    (path,) = in_one_file("made", "Made", lambda scale: {"environment": {}}, Mock()).run(
        Request(output=tmp_path)
    )
    env = json.loads(path.read_text(encoding="utf-8"))["environment"]
    assert re.fullmatch(r"[0-9a-f]{40}(-changed)?", env["commit"])
    assert env["streams"] == STREAM_VERSION


@pytest.mark.slow
def test_a_committed_cell_of_a_sweep_comes_out_again() -> None:
    """Its noise, its first losses and its score; other processors may round the losses apart.

    Its noise may have become a little less, where calibration comes closer to its target since.
    """
    pytest.importorskip("sklearn")
    sweep = load_sweep(
        ROOT / "sweeps" / "opacus_digits.toml", results=ROOT / "results" / "opacus_digits"
    )
    cell = next(iter(sweep.main_cells({})))
    record = json.loads((sweep.results / cell.file_name).read_text(encoding="utf-8"))
    again = run_cell(cell, Tasks())
    assert again is not None
    exact = ("data", "initial_weights", "streams", "num_steps")
    assert {key: again[key] for key in exact} == {key: record[key] for key in exact}
    (block,), (before,) = again["blocks"], record["blocks"]
    noise = pytest.approx(before["noise_multiplier"], rel=1e-3)
    assert block == before | {"noise_multiplier": noise}
    assert again["first_losses"] == pytest.approx(record["first_losses"], rel=1e-3)
    # Of 360 images, those on the edge between two classes may change sides.
    assert again["score"] == pytest.approx(record["score"], abs=5 / 360)
