"""The core is small and stands alone: its lines, imports, and who may draw noise."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from architecture.test_imports import SOURCE, imports_of

CORE = SOURCE / "shuffled_dpsgd" / "core"
FILES = sorted(CORE.glob("*.py"))
MOST_LINES = 3_000
FOREIGN = {"torch", "numpy", "scipy", "dp_accounting", "cryptography"}
# Auditing attacks the mechanism itself, on sums without records.
MAY_PRIVATIZE = {"core/mechanism.py", "core/release.py", "auditing/probes.py"}
MAY_PRIVATIZE |= {"auditing/taps.py"}
MAY_ADD_NOISE = {"core/noise.py", "core/mechanism.py", "training/device_noise.py"}


def test_the_core_is_small() -> None:
    assert sum(len(path.read_text().splitlines()) for path in FILES) <= MOST_LINES


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_core_imports_nothing_else_of_ours(path: Path) -> None:
    for target in imports_of(path):
        first = target.split(".")[0]
        ours = target == "shuffled_dpsgd.errors" or target.startswith("shuffled_dpsgd.core")
        assert ours or first in FOREIGN | set(sys.stdlib_module_names), target


def test_every_file_of_the_core_is_on_the_reading_list() -> None:
    page = (SOURCE.parent / "docs" / "trust.md").read_text()
    named = set(re.findall(r"`core/(\w+\.py)`", page))
    assert {path.name for path in FILES} - named <= {"__init__.py", "claim.py"}


def test_importing_the_core_loads_no_other_room_and_starts_nothing() -> None:
    modules = [f"shuffled_dpsgd.core.{path.stem}" for path in FILES if path.stem != "__init__"]
    code = (
        "import importlib, json, sys, threading, multiprocessing\n"
        f"for module in {modules!r}: importlib.import_module(module)\n"
        "ours = [n for n in sys.modules if n.startswith('shuffled_dpsgd.')]\n"
        "print(json.dumps([ours, threading.active_count(),"
        " len(multiprocessing.active_children())]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    ours, threads, children = json.loads(done.stdout)
    rooms = {name.split(".")[1] for name in ours}
    assert rooms == {"core", "errors"}
    assert (threads, children) == (1, 0)


def test_the_core_trains_with_every_other_folder_deleted(tmp_path: Path) -> None:
    """Copied alone, with `errors.py` and an empty package around them."""
    package = tmp_path / "shuffled_dpsgd"
    shutil.copytree(CORE, package / "core", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(SOURCE / "shuffled_dpsgd" / "errors.py", package)
    (package / "__init__.py").touch()
    code = (
        "import torch\n"
        "from shuffled_dpsgd.core.run import plain_plan, train\n"
        "model = torch.nn.Linear(2, 1)\n"
        "data = [(torch.randn(2), torch.randn(1)) for _ in range(30)]\n"
        "plan = plain_plan(model, dataset_size=30, expected_batch_size=3, num_steps=4, delta=1e-3,"
        " clip_norm=1.0, noise_multiplier=1.0)\n"
        "loss = lambda model, r: (model(r[0]) - r[1]).square().sum()\n"
        "print(train(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, data, plan))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path), "PATH": ""},
    )
    assert "Privacy card after 4 of 4 steps" in done.stdout
    assert "(proven)" in done.stdout


def callers_of(method: str) -> set[str]:
    found = set()
    for path in (SOURCE / "shuffled_dpsgd").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            called = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
            if called and node.func.attr == method:  # type: ignore[attr-defined]
                found.add(path.relative_to(SOURCE / "shuffled_dpsgd").as_posix())
    return found


def test_nothing_but_the_door_calls_the_mechanism() -> None:
    assert callers_of("privatize") <= MAY_PRIVATIZE


def test_nothing_but_the_mechanism_adds_noise() -> None:
    """`add_` of a noise source takes a key; torch's own does not."""
    found = set()
    for path in (SOURCE / "shuffled_dpsgd").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                keyed = any(keyword.arg == "key" for keyword in node.keywords)
                if node.func.attr == "add_" and keyed:
                    found.add(path.relative_to(SOURCE / "shuffled_dpsgd").as_posix())
    assert found <= MAY_ADD_NOISE
