"""Journals of audits: what was written whole is read, and nothing else."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shuffled_dpsgd.auditing.estimators import ScorePair
from shuffled_dpsgd.auditing.verdict import Evidence, ThreatModel
from shuffled_dpsgd.errors import CheckpointError, InvalidArgumentError
from shuffled_dpsgd_experiments.journal import Journal, read_journals


def test_items_of_all_journals_are_read_up_to_where_one_was_cut(tmp_path: Path) -> None:
    first, second = Journal(tmp_path / "a.0.journal"), Journal(tmp_path / "a.1.journal")
    for item in ("one", "two"):
        first.add(item)
    second.add("three")
    cut = tmp_path / "a.0.journal"
    cut.write_bytes(cut.read_bytes()[:-3])
    origin, items = read_journals(tmp_path, "a")
    assert items == ["one", "three"]
    assert origin.device
    assert origin.environment["date"]


def test_nothing_to_finish_is_an_error(tmp_path: Path) -> None:
    Journal(tmp_path / "a.journal")
    with pytest.raises(InvalidArgumentError, match="--finish"):
        read_journals(tmp_path, "a")


def test_a_journal_of_a_stranger_runs_nothing(tmp_path: Path) -> None:
    """Pickles are not read, and no class but dataclasses of this project is built."""
    opened = tmp_path / "opened"

    class Opens:
        def __reduce__(self) -> Any:
            return (Path.touch, (opened,))

    path = tmp_path / "a.journal"
    path.write_bytes(pickle.dumps(Opens()))
    with pytest.raises(CheckpointError, match="not a journal"):
        read_journals(tmp_path, "a")
    assert not opened.exists()
    for where in (["pathlib", "Path"], ["shuffled_dpsgd.core.ledger", "Ledger"]):
        path.write_text(json.dumps({"$class": where, "fields": {}}) + "\n")
        with pytest.raises(CheckpointError, match=where[1]):
            read_journals(tmp_path, "a")


def test_arrays_and_dataclasses_come_back_as_they_were(tmp_path: Path) -> None:
    item = Evidence(
        adversary="a",
        canary="b",
        threat_model=ThreatModel.ITERATES,
        scores=ScorePair(out=np.array([0.25, -1e-300]), present=np.array([1.0, 1 / 3])),
    )
    Journal(tmp_path / "a.journal").add({3: (item, None, [True])})
    [found] = read_journals(tmp_path, "a")[1]
    assert list(found) == [3]
    again = found[3][0]
    assert (again.adversary, again.closed_form, found[3][1:]) == ("a", None, (None, [True]))
    np.testing.assert_array_equal(again.scores.present, item.scores.present)
    np.testing.assert_array_equal(again.scores.out, item.scores.out)
    assert again.threat_model is ThreatModel.ITERATES
