"""`make size` counts what is there, and fails above a budget."""

from __future__ import annotations

from pathlib import Path

import pytest

from architecture import size


def test_lines_and_files_are_counted(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("1\n\n3\n")
    (tmp_path / "b.c").write_text("1\n")
    (tmp_path / "c.json").write_text("{}\n")
    found = size.files_of(tmp_path)
    assert (len(found), size.lines_of(found)) == (2, 4)


def test_a_count_above_its_budget_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = size.measure()["lines of core"]
    monkeypatch.setattr(size, "BUDGETS", {"lines of core": (lines, 0)})
    assert size.main() == 0
    monkeypatch.setattr(size, "BUDGETS", {"lines of core": (lines - 1, 0)})
    assert size.main() == 1
    assert "above" in capsys.readouterr().out
