"""The experiments are beside the package in a clone, and in no wheel."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from shuffled_dpsgd.cli import audit, experiments, main

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def wheel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[typer.Typer]:
    """The command of an installed wheel: the package without the experiments."""
    with monkeypatch.context() as patch:
        patch.setattr(experiments, "ROOT", tmp_path)
        patch.setitem(sys.modules, experiments.NAME, None)
        importlib.reload(audit)
        yield importlib.reload(main).app
    importlib.reload(audit)
    importlib.reload(main)


@pytest.mark.parametrize(
    "arguments",
    [
        ["reproduce", "--list"],
        ["sweep", "sweeps/digits.toml", "--table"],
        ["examine", "--epsilon", "1", "--delta", "1e-5"],
        ["audit", "blackbox"],
        ["audit", "step", "--dimension", "10", "--sigma", "1"],
        ["audit", "composition", "--sigma", "1"],
        ["train", "--preset", "paper/bert-sst2", "--epsilon", "1", "--dry-run"],
    ],
    ids=lambda arguments: " ".join(arguments[:2]),
)
def test_a_wheel_says_on_one_line_that_a_clone_is_needed(
    arguments: list[str], wheel: typer.Typer
) -> None:
    done = CliRunner().invoke(wheel, arguments)
    assert done.exit_code == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "needs the experiments, which are in no wheel: clone the repository" in done.stderr


def test_a_wheel_says_so_to_machines(wheel: typer.Typer) -> None:
    done = CliRunner().invoke(wheel, ["reproduce", "all", "--json"])
    assert done.exit_code == 2
    assert "clone the repository" in json.loads(done.stdout)["error"]


def test_a_wheel_has_the_recipes_and_names_them(wheel: typer.Typer) -> None:
    assert experiments.find_preset("recipe/digits").dataset_size == 1437
    done = CliRunner().invoke(wheel, ["train", "--preset", "recipe/nonsense", "--epsilon", "1"])
    assert done.exit_code == 2
    assert "one of recipe/digits, recipe/digits-linear, recipe/sst2-minilm" in done.stderr


def test_a_clone_finds_them_from_any_folder_and_so_do_its_processes(tmp_path: Path) -> None:
    code = (
        "import json, subprocess, sys\n"
        "from shuffled_dpsgd.cli.experiments import need_experiments\n"
        "need_experiments('this test')\n"
        "import shuffled_dpsgd_experiments as here\n"
        "say = 'import shuffled_dpsgd_experiments as e; print(e.__file__)'\n"
        "there = subprocess.run([sys.executable, '-c', say], capture_output=True, text=True)\n"
        "print(json.dumps([here.__file__, there.stdout.strip()]))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout) == [str(ROOT / experiments.NAME / "__init__.py")] * 2


def test_the_wheel_is_made_of_src_alone() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["tool"]["setuptools"]["packages"] == {"find": {"where": ["src"]}}
    packages = {path.parent.name for path in (ROOT / "src").glob("*/__init__.py")}
    assert packages == {"shuffled_dpsgd"}


@pytest.mark.slow
def test_a_built_wheel_lacks_the_experiments(tmp_path: Path) -> None:
    pytest.importorskip("setuptools")
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("*.egg-info"))
    shutil.copytree(ROOT / experiments.NAME, tmp_path / experiments.NAME)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    command = [sys.executable, "-m", "pip", "wheel", ".", "--no-deps"]
    subprocess.run(command, check=True, capture_output=True, cwd=tmp_path)
    (built,) = tmp_path.glob("*.whl")
    rooms = {name.split("/")[0] for name in zipfile.ZipFile(built).namelist()}
    assert {room for room in rooms if not room.endswith(".dist-info")} == {"shuffled_dpsgd"}
