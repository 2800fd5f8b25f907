"""Journals of audits: what was written whole is read, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from shuffled_dpsgd.errors import InvalidArgumentError
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
