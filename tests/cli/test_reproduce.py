"""`reproduce`: figures by name, into a folder, with their data."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from shuffled_dpsgd.cli.main import app


def test_a_figure_lands_in_the_folder(tmp_path: Path) -> None:
    done = CliRunner().invoke(
        app, ["reproduce", "fig1", "fig4", "--output", str(tmp_path), "--json"]
    )
    assert done.exit_code == 0, done.output
    written = {name: each["written"] for name, each in json.loads(done.stdout).items()}
    assert list(written) == ["fig1", "fig4"]
    for paths in written.values():
        assert {Path(path).suffix for path in paths} == {".json", ".png", ".svg"}
        assert all(Path(path).stat().st_size > 500 for path in paths)


def test_the_list_describes_all_four() -> None:
    done = CliRunner().invoke(app, ["reproduce", "--list", "--json"])
    assert {"fig1", "fig2", "fig3", "fig4"} <= set(json.loads(done.stdout))


def test_an_unknown_name_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["reproduce", "fig1", "fig9", "--output", str(tmp_path)])
    assert done.exit_code == 2
    assert "fig9" in done.stderr
    assert not list(tmp_path.iterdir())


def test_no_name_is_an_error_that_lists_the_names() -> None:
    done = CliRunner().invoke(app, ["reproduce"])
    assert done.exit_code == 2
    assert "fig1" in done.stderr
