"""One name, one thing: no two classes of the package and its experiments share a name."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = [
    path for name in ("src", "shuffled_dpsgd_experiments") for path in (ROOT / name).rglob("*.py")
]


def test_every_class_has_a_name_of_its_own() -> None:
    places = defaultdict(list)
    for path in sorted(FILES):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(path.relative_to(ROOT)))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
