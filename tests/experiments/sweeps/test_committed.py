"""Committed cells stay valid: each is found again by the sweep file that it came from.

A cell is found by its configuration. Whatever changes what a row of a sweep file means, such as a
method's defaults, must be written out in that file; otherwise its cells would be run again.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shuffled_dpsgd.clipping.contributions.cost import STRATEGIES, NormMethod
from shuffled_dpsgd.models import CATALOGUE
from shuffled_dpsgd_experiments.sweeps import Sweep, load_sweep
from shuffled_dpsgd_experiments.sweeps.cell import Tasks, run_cell
from shuffled_dpsgd_experiments.sweeps.grid import Cell, identity_of
from shuffled_dpsgd_experiments.sweeps.running import KnownCells
from shuffled_dpsgd_experiments.sweeps.store import read_records
from shuffled_dpsgd_experiments.tables.printed import EPSILONS, RESULTS

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


GHOST, MIXOPT = "ghost clipping, noise by RDP", "mixopt, noise by RDP"


def same_but_for_rounding(ghost: dict[str, Any], mixopt: dict[str, Any]) -> None:
    same = ("data", "initial_weights", "streams", "blocks", "certified", "seed", "score")
    assert [ghost[key] for key in same] == [mixopt[key] for key in same]
    assert ghost["first_losses"] == pytest.approx(mixopt["first_losses"], rel=1e-4)
    assert ghost["loss"] == pytest.approx(mixopt["loss"], rel=1e-4)


def test_ghost_clipping_and_mixopt_trained_the_same_models() -> None:
    records = read_records(ROOT / "results" / "paper_digits")
    found = {(each["method"], each["epsilon"], each["seed"]): each for each in records}
    pairs = [(epsilon, seed) for method, epsilon, seed in found if method == GHOST]
    assert len(pairs) >= 10
    for pair in pairs:
        assert found[GHOST, *pair]["loss"] == found[MIXOPT, *pair]["loss"]
        same_but_for_rounding(found[GHOST, *pair], found[MIXOPT, *pair])


def test_what_the_page_quotes_of_ghost_clipping_and_mixopt_was_printed() -> None:
    ghost, mixopt, _ = RESULTS["table5"]["GPT-2", "DART", "BLEU"][1 + EPSILONS.index(0.5)]
    page = (ROOT / "docs" / "parts.md").read_text(encoding="utf-8")
    assert f"the paper's {ghost} and {mixopt} BLEU for them (DART, ε = 0.5)" in page


@pytest.mark.slow
def test_ghost_clipping_and_mixopt_train_the_same_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where inputs are so long that MixOpt keeps gradients, which is pretended here."""
    pytest.importorskip("sklearn")
    kept: list[tuple[int, int, int]] = []

    def keep(T: int, R: int, C: int, device: str) -> NormMethod:
        kept.append((T, R, C))
        return NormMethod.INSTANTIATE

    monkeypatch.setitem(STRATEGIES, "mixed", keep)
    sweep = load_sweep(ROOT / "sweeps" / "paper_digits.toml")

    def short(method: str) -> Cell:
        cell = next(each for each in sweep.main_cells({}) if each.method == method)
        training = replace(cell.config.training, epochs=2)
        return replace(cell, config=replace(cell.config, training=training))

    tasks = Tasks()
    ghost, mixopt = (run_cell(short(method), tasks) for method in (GHOST, MIXOPT))
    assert ghost is not None
    assert mixopt is not None
    assert kept
    same_but_for_rounding(ghost, mixopt)
