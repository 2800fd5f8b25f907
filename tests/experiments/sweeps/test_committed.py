"""Committed cells stay valid: each is found again by the sweep file that it came from.

A cell is found by its configuration. Whatever changes what a row of a sweep file means, such as a
method's defaults, must be written out in that file; otherwise its cells would be run again.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from shuffled_dpsgd.models import CATALOGUE
from shuffled_dpsgd_experiments.sweeps import Sweep, load_sweep
from shuffled_dpsgd_experiments.sweeps.grid import identity_of
from shuffled_dpsgd_experiments.sweeps.running import KnownCells

ROOT = Path(__file__).parents[3]
FOLDERS = sorted({path.parent for path in (ROOT / "results").glob("*/main_*.json")})


def sweep_of(folder: Path, places: Path) -> Sweep:
    """The folder's sweep, with an empty folder for each one that it takes a name from."""
    config = json.loads(next(folder.glob("*_seed*.json")).read_text(encoding="utf-8"))["config"]
    name, format_ = config["model"]["name"], config["data"]["format"]
    model = None
    if name not in CATALOGUE:
        (places / name).mkdir()
        model = str(places / name)
    called = str(config["data"].get("name", "")).removeprefix(f"{format_} (")
    data = str(places / called[:-1]) if called.endswith(")") else None
    return load_sweep(
        ROOT / "sweeps" / f"{folder.name}.toml", model=model, data=data, results=folder
    )


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_every_committed_cell_is_found_by_its_sweep(folder: Path, tmp_path: Path) -> None:
    known = KnownCells(sweep_of(folder, tmp_path)).read()
    cells = [cell for cell, record in known if record is not None]
    found = {name for cell in cells for name in (cell.file_name, cell.older_name)}
    assert {path.name for path in folder.glob("*_seed*.json")} - found == set()


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_name_says_which_streams_the_noise_is_from(folder: Path) -> None:
    """Old names do not, and no record with streams has one of them."""
    for path in folder.glob("*_seed*.json"):
        record = json.loads(path.read_text(encoding="utf-8"))
        if "streams" in record:
            facts = [identity_of(record["config"]), record["seed"], record["stage"]]
            facts.append({"streams": record["streams"]})
            digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
            assert path.stem.endswith(digest[:8])
