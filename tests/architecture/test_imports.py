"""Dependencies point one way; this reads every import and fails on any other edge."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src"
EXPERIMENTS = ROOT / "shuffled_dpsgd_experiments"
FLOOR = {"errors", "runtime"}
CORE = {"core"}
BUILDING_BLOCKS = {"permutation", "clipping", "accounting"}
TRAINING = FLOOR | CORE | BUILDING_BLOCKS | {"options", "distributed", "training"}
PRODUCT = TRAINING | {"models", "environment", "integrations", "reports", "scaling"}
ALLOWED = {
    "errors": set(),
    "core": {"errors"},
    "environment": set(),
    "runtime": {"errors"},
    "distributed": FLOOR | CORE,
    "options": {"errors", "core"},
    "models": {"errors"},
    "permutation": FLOOR | CORE,
    "clipping": FLOOR | CORE,
    "accounting": {"errors", "core"},
    "scaling": FLOOR | CORE | {"clipping"},
    "training": FLOOR | CORE | BUILDING_BLOCKS | {"options", "distributed"},
    "integrations": TRAINING | {"reports", "environment"},
    "auditing": TRAINING | {"reports"},
    "reports": TRAINING,
    "testing": {"errors", "clipping"},
    "tasks": PRODUCT | {"auditing"},
    "experiments": PRODUCT | {"auditing", "tasks", "cli"},
    "cli": PRODUCT | {"auditing", "tasks", "experiments"},
    "__main__": {"cli"},
}
TORCH_FREE = ("accounting", "auditing/estimators")


def room_of(module: str) -> str:
    """The room a dotted module name belongs to."""
    parts = module.split(".")
    if parts[0] == "shuffled_dpsgd_experiments":
        return "experiments"
    return parts[1] if len(parts) > 1 else ""


def module_of(path: Path) -> str:
    home = SOURCE if path.is_relative_to(SOURCE) else ROOT
    parts = path.relative_to(home).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def imports_of(path: Path) -> frozenset[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; write the full name"
            found.add(node.module or "")
            home = ROOT if (node.module or "").startswith(EXPERIMENTS.name) else SOURCE
            folder = home / (node.module or "").replace(".", "/")
            # `from room import module` names the module, not the room's door.
            found |= {
                f"{node.module}.{alias.name}"
                for alias in node.names
                if (folder / alias.name).is_dir() or (folder / f"{alias.name}.py").is_file()
            }
    return frozenset(found)


FILES = sorted(SOURCE.rglob("*.py"))
ALL_FILES = [*FILES, *sorted(EXPERIMENTS.rglob("*.py"))]


@pytest.mark.parametrize("path", ALL_FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_one_way(path: Path) -> None:
    room = room_of(module_of(path))
    if room == "":
        return
    for target in imports_of(path):
        if not target.startswith("shuffled_dpsgd"):
            continue
        other = room_of(target)
        assert other in ("", room) or other in ALLOWED[room], f"{room} must not import {target}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_torch_free_rooms_stay_torch_free(path: Path) -> None:
    inside = str(path.relative_to(SOURCE / "shuffled_dpsgd")) if "dpsgd/" in str(path) else ""
    if inside.startswith(TORCH_FREE):
        assert not {t for t in imports_of(path) if t.split(".")[0] == "torch"}


# In this order in one process: whatever a line must not load, the lines before it must not either.
LIGHT = {
    "shuffled_dpsgd": ("torch", "numpy", "scipy"),
    "shuffled_dpsgd.options": ("torch", "numpy", "scipy"),
    "shuffled_dpsgd.cli.main": ("torch", "numpy", "scipy", "matplotlib"),
    "shuffled_dpsgd.models": ("torch", "numpy", "transformers"),
    "shuffled_dpsgd.accounting": ("torch",),
    "shuffled_dpsgd.clipping": ("transformers", "dp_accounting", "torch._dynamo"),
    "shuffled_dpsgd.permutation": ("transformers", "dp_accounting", "torch._dynamo"),
    "shuffled_dpsgd.training": ("transformers", "dp_accounting", "torch._dynamo"),
    "shuffled_dpsgd.tasks": ("transformers", "sklearn", "datasets"),
}


@pytest.fixture(scope="module")
def loaded() -> dict[str, list[str]]:
    """What has been loaded once each module is imported."""
    code = (
        "import importlib, json, sys\nloaded = {}\n"
        f"for module in {[*LIGHT]!r}:\n"
        "    importlib.import_module(module)\n"
        "    loaded[module] = list(sys.modules)\n"
        "print(json.dumps(loaded))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("module", LIGHT)
def test_import_is_light(module: str, loaded: dict[str, list[str]]) -> None:
    assert module in loaded[module]
    assert [name for name in LIGHT[module] if name in loaded[module]] == []


# Imports every module and prints whatever thread or process was started meanwhile.
STARTS = """
import importlib, json, pkgutil, sys, threading
found, module = [], ""
EVENTS = {"subprocess.Popen", "os.fork", "os.posix_spawn", "os.system"}
sys.addaudithook(lambda event, _: found.append([module, event]) if event in EVENTS else None)
threading.Thread.start = lambda thread: found.append([module, thread.name])
import shuffled_dpsgd
count = 0
for each in pkgutil.walk_packages(shuffled_dpsgd.__path__, "shuffled_dpsgd."):
    module = each.name
    if not module.endswith("__main__"):
        importlib.import_module(module)
        count += 1
print(json.dumps([count, found]))
"""


@pytest.mark.slow
def test_importing_any_module_starts_no_thread_and_no_process() -> None:
    done = subprocess.run(
        [sys.executable, "-c", STARTS], capture_output=True, text=True, check=True
    )
    count, found = json.loads(done.stdout)
    assert count > 250
    assert found == []
