"""The package stands on its own: it is built, installed where no clone is, and used there."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
HERE = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"}


def run(*words: object, cwd: Path, code: int = 0) -> str:
    """Standard output of a command that sees nothing of this clone."""
    env = {name: value for name, value in os.environ.items() if name not in HERE}
    done = subprocess.run(list(map(str, words)), cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout if code == 0 else done.stdout + done.stderr


@pytest.mark.slow
def test_an_installed_wheel_trains_evaluates_and_audits(tmp_path: Path) -> None:
    """The wheel is made from the source distribution, which is installed as well in the end."""
    run(sys.executable, "-m", "build", "--outdir", tmp_path, ROOT, cwd=tmp_path)
    (wheel,), (source,) = tmp_path.glob("*.whl"), tmp_path.glob("*.tar.gz")
    venv.create(tmp_path / "clean", with_pip=True)
    programs = tmp_path / "clean" / "bin"
    constraints = ROOT / "constraints.txt"
    run(programs / "pip", "install", "-q", "-c", constraints, f"{wheel}[hf]", cwd=tmp_path)
    where = "import shuffled_dpsgd as s; print(s.__file__, s.__version__)"
    file, version = run(programs / "python", "-c", where, cwd=tmp_path).split()
    assert file.startswith(str(tmp_path / "clean"))
    assert wheel.name.split("-")[1] == version
    command = programs / "shuffled-dpsgd"
    sizes = ("--epochs", "2", "--batch-size", "200")
    run(command, "train", "digits", *sizes, "--output", "run", "--json", cwd=tmp_path)
    assert json.loads(run(command, "evaluate", "run", "--json", cwd=tmp_path))["score"] > 0.2
    audit = ("audit", "run-folder", "run", "--canaries", "20", "--input-canaries", "0", "--json")
    card = json.loads(run(command, *audit, cwd=tmp_path))["card"]
    assert card["audits"]
    record = yaml.safe_load(run(command, "card", "run", "--format", "registry", cwd=tmp_path))
    loss = record["deployment"]["privacy_loss"]["privacy_parameters"]
    assert loss["epsilon"] == card["certified"]["epsilon"]
    for verb in (["reproduce", "all"], ["sweep"]):
        assert "clone the repository" in run(command, *verb, cwd=tmp_path, code=2)
    again = ("--no-deps", "--force-reinstall", source)
    run(programs / "pip", "install", "-q", *again, cwd=tmp_path)
    file, again_version = run(programs / "python", "-c", where, cwd=tmp_path).split()
    assert (Path(file).is_file(), again_version) == (True, version)
    assert json.loads(run(command, "evaluate", "run", "--json", cwd=tmp_path))["score"] > 0.2


def test_the_oldest_releases_tested_are_those_asked_for() -> None:
    """What .github/oldest.txt fixes is the lower bound in pyproject.toml, of every line of it."""
    extras = PROJECT["optional-dependencies"].values()
    asked = "\n".join([*PROJECT["dependencies"], *(line for extra in extras for line in extra)])
    fixed = re.findall(r"^([\w-]+)==([\d.]+)$", (ROOT / ".github/oldest.txt").read_text(), re.M)
    assert {name for name, _ in fixed} == {"torch", "transformers", "triton"}
    for name, version in fixed:
        (bound,) = re.findall(rf"^{name}>=([\d.]+)", asked, re.M)
        assert version == bound + (len(version.split(".")) - len(bound.split("."))) * ".0"


def test_workflows_are_yaml_and_cover_the_pythons_promised() -> None:
    found = {}
    for path in [*(ROOT / ".github").rglob("*.yml"), ROOT / ".pre-commit-config.yaml"]:
        found[path.name] = yaml.safe_load(path.read_text())
    matrix = found["test.yml"]["jobs"]["test"]["strategy"]["matrix"]
    promised = [line.rpartition(" ")[2] for line in PROJECT["classifiers"] if "Python :: " in line]
    assert matrix["python"] == promised
    assert PROJECT["requires-python"] == f">={promised[0]}"
    assert {each["releases"] for each in matrix["include"]} == {"oldest", "newest"}
    slow = [step.get("run", "") for step in found["test.yml"]["jobs"]["site-and-package"]["steps"]]
    for place in ("tests/test_package.py", "tests/test_docs.py", "tests/examples"):
        assert (ROOT / place).exists()
        assert any("-m slow" in command and place in command for command in slow)
    release = found["release.yml"]["jobs"]
    assert release["test"]["uses"] == "./.github/workflows/test.yml"
    assert {"test", "build"} <= {*release["publish"]["needs"]}
    assert "workflow_call" in found["test.yml"][True]  # YAML reads `on` as a truth value.
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["cff-version"] == "1.2.0"
