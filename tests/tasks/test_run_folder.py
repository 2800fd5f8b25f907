"""The folder of a run: whose it is, and what a start that was killed leaves there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shuffled_dpsgd.core.ledger import Ledger
from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.tasks.run_folder import UNFINISHED, claim_directory


def begin(folder: Path, *, releases: int) -> None:
    """What is there before `run.json` is: a ledger with its key, the mark of the records."""
    folder.mkdir()
    ledger = Ledger(plan_fingerprint="p", max_releases=3, path=folder / "ledger.jsonl")
    assert ledger.key
    for step in range(releases):
        ledger.record(step=step, token=f"t{step}")
    (folder / "_data.json").write_text(json.dumps({"num_records": 3}))
    (folder / UNFINISHED).write_text("{")


def test_a_start_that_was_killed_before_its_run_began_is_started_again(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    begin(folder, releases=0)
    assert claim_directory(folder) == folder
    assert list(folder.iterdir()) == []


def test_releases_are_never_forgotten(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    begin(folder, releases=1)
    with pytest.raises(InvalidArgumentError, match="an empty or new folder"):
        claim_directory(folder)
    assert (folder / "ledger.jsonl").read_text().count("\n") == 2


@pytest.mark.parametrize("name", ["run.json", "notes.txt"])
def test_a_run_and_what_is_not_ours_stay(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "run"
    begin(folder, releases=0)
    (folder / name).touch()
    with pytest.raises(InvalidArgumentError, match="an empty or new folder"):
        claim_directory(folder)
    assert (folder / name).exists()
    assert (folder / "ledger.jsonl").exists()
