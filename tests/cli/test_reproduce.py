"""`reproduce`: figures by name, into a folder, with their data."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shuffled_dpsgd.cli.main import app


def test_a_figure_lands_in_the_folder(tmp_path: Path) -> None:
    done = CliRunner().invoke(
        app, ["reproduce", "fig2", "fig1", "--output", str(tmp_path), "--json"]
    )
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    written = {name: each["written"] for name, each in found.items()}
    assert list(written) == ["fig2", "fig1"]
    assert found["fig1"]["exhibit"]["rows"][1]["verdict"] == "as printed"
    for paths in written.values():
        assert {Path(path).suffix for path in paths} == {".json", ".png", ".svg"}
        assert all(Path(path).stat().st_size > 500 for path in paths)


def test_what_is_there_is_shown_and_nothing_is_computed_for_it() -> None:
    results = Path(__file__).resolve().parents[2] / "results"
    for name, said in (("fig1", "| 13.96 |"), ("claims", "the claim does not hold")):
        done = CliRunner().invoke(
            app, ["reproduce", name, "--from-results", "--output", str(results)]
        )
        assert done.exit_code == 0, done.output
        assert said in done.stdout


@pytest.mark.slow
def test_everything_is_shown_from_the_committed_results(tmp_path: Path) -> None:
    results = tmp_path / "results"
    shutil.copytree(Path(__file__).resolve().parents[2] / "results", results)
    before = {path for path in results.rglob("*") if path.is_file()}
    arguments = ["reproduce", "all", "--from-results", "--json", "--output", str(results)]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    for name in (*(f"fig{n}" for n in range(1, 5)), *(f"table{n}" for n in range(1, 9)), "claims"):
        assert found[name]["missing"] is None
        assert found[name]["exhibit"]["rows"]
        assert found[name]["written"] == []
    written = {path for path in results.rglob("*") if path.is_file()} - before
    assert written <= {results / f"{name}" for name in ("reproduction.html", "frontier.json")}
    page = (results / "reproduction.html").read_text()
    # The frontier, four figures and tables 3 to 5; a link to each section.
    assert page.count("<figure>") == 8
    assert all(f'href="#{name}"' in page and f'id="{name}"' in page for name in found)


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


@pytest.mark.parametrize("name", ["table3", "table4", "table5"])
def test_without_the_data_nothing_is_left_behind(tmp_path: Path, name: str) -> None:
    output = tmp_path / "new" / "results"
    places = ["--data", str(tmp_path / "nowhere"), "--output", str(output)]
    done = CliRunner().invoke(app, ["reproduce", name, "--scale", "paper", *places])
    assert done.exit_code == 2
    assert "nowhere" in done.stderr
    assert not list(tmp_path.iterdir())
