"""What users may import: what the package and its rooms offer, by a list of its own."""

from __future__ import annotations

import ast
import re
from importlib import import_module
from pathlib import Path

import pytest

import shuffled_dpsgd

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "shuffled_dpsgd"
# A line of an example, of a notebook or of a page; a list may go on over lines in brackets.
IMPORT = re.compile(r"from (shuffled_dpsgd[\w.]*) import (\([^)]*\)|[\w, ]+)")


def offered() -> dict[str, set[str]]:
    """The `__all__` of the package and of every room that has one."""
    found = {"shuffled_dpsgd": set(shuffled_dpsgd.__all__)}
    for path in sorted([*PACKAGE.glob("*/__init__.py"), PACKAGE / "testing.py"]):
        name = path.stem if path.parent == PACKAGE else path.parent.name
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                found[f"shuffled_dpsgd.{name}"] = set(ast.literal_eval(node.value))
    return found


def test_exactly_what_is_listed_is_offered() -> None:
    listed = set((ROOT / "tests/golden/public_names.txt").read_text(encoding="utf-8").split())
    assert listed == {f"{module}.{name}" for module, names in offered().items() for name in names}


@pytest.mark.parametrize("module", offered())
def test_what_is_offered_is_there(module: str) -> None:
    for name in offered()[module]:
        assert getattr(import_module(module), name) is not None
    assert set(shuffled_dpsgd.__all__) <= set(dir(shuffled_dpsgd))


def test_pages_and_examples_import_public_names_only() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    examples = [*(ROOT / "examples").rglob("*.py"), *(ROOT / "examples").rglob("*.ipynb")]
    known, found = offered(), []
    for path in [*pages, *examples]:
        for module, names in IMPORT.findall(path.read_text(encoding="utf-8")):
            for name in re.findall(r"\w+", names.split(" as ")[0]):
                found.append((str(path.relative_to(ROOT)), module, name))
    assert len(found) > 10
    assert [each for each in found if each[2] not in known.get(each[1], ())] == []


def test_unknown_name_is_refused() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = shuffled_dpsgd.nonsense
