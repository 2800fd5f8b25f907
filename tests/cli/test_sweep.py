"""`sweep`: the table and its JSON, of a folder that has some of the cells."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from experiments.sweeps.test_running import pretended
from shuffled_dpsgd.cli.main import app
from shuffled_dpsgd_experiments.sweeps import cell as cell_module
from shuffled_dpsgd_experiments.sweeps import load_sweep
from shuffled_dpsgd_experiments.sweeps.cell import Tasks
from shuffled_dpsgd_experiments.sweeps.grid import Cell
from shuffled_dpsgd_experiments.sweeps.store import Store

FILE = """
name = "small"
epsilons = [1.0]
seeds = [0, 1]
[run]
task = "digits"
model.name = "vit-digits"
data.format = "digits"
privacy = {delta = 1e-4, clip_norm = 1.0}
training = {expected_batch_size = 480, num_steps = 2}
[[methods]]
name = "certified"
run.privacy.method = "certified"
"""


def test_the_table_says_whether_all_cells_are_there(tmp_path: Path) -> None:
    file = tmp_path / "sweep.toml"
    file.write_text(FILE)
    arguments = ["sweep", str(file), "--results", str(tmp_path), "--table", "--json"]
    sweep = load_sweep(file, results=tmp_path)
    for cell, complete in zip(sweep.main_cells({}), (False, True), strict=True):
        Store(tmp_path).add(cell, pretended([])(cell, Tasks()))
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, result.output
        found = json.loads(result.stdout)
        assert found["complete"] is complete
    (row,) = found["rows"]
    assert (row["sweep"], row["method"], row["seeds"]) == ("small", "certified", 2)
    assert row["certified_epsilon"]["kind"] == "proven"


def test_a_failed_cell_is_told_and_counts_in_the_exit_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def record(cell: Cell, tasks: Tasks) -> dict[str, Any]:
        if cell.seed == 0:
            raise RuntimeError("out of memory")
        return pretended([])(cell, tasks)

    monkeypatch.setattr(cell_module, "_record", record)
    monkeypatch.setattr(cell_module, "_free_memory", lambda: None)  # Slow among many tests.
    file = tmp_path / "sweep.toml"
    file.write_text(FILE)
    arguments = ["sweep", str(file), "--results", str(tmp_path / "found")]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    lines = result.stderr.splitlines()
    assert lines[0].startswith("error: cell failed: certified, ε = 1, seed 0: RuntimeError: out of")
    assert lines[1].startswith("cell 1 of 2: certified, ε = 1, seed 1: accuracy")
    assert lines[2].startswith("error: 1 cell failed: certified, ε = 1, seed 0. ")
    assert len(list((tmp_path / "found").iterdir())) == 1
    result = CliRunner().invoke(app, [*arguments, "--json"])
    assert result.exit_code == 2
    assert "1 cell failed" in json.loads(result.stdout)["error"]
