"""`sweep`: the table and its JSON, of a folder that has some of the cells."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from experiments.sweeps.test_running import pretended
from shuffled_dpsgd.cli.main import app
from shuffled_dpsgd_experiments.sweeps import load_sweep
from shuffled_dpsgd_experiments.sweeps.cell import Tasks
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
