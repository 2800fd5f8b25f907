"""Inside two large rooms, folders or modules depend on each other one way as well."""

from __future__ import annotations

from pathlib import Path

import pytest

from architecture.test_imports import SOURCE, imports_of, module_of

KERNELS = {"kernels"}
CONTRIBUTIONS = KERNELS | {"contributions"}
CAPTURE = CONTRIBUTIONS | {"capture"}
EDGES = {
    "clipping": {
        "kernels": set(),
        "contributions": KERNELS,
        "capture": CONTRIBUTIONS,
        "rules": CAPTURE,
        "finalize": CAPTURE,
        "checks": CAPTURE | {"rules"},
        "reference": set(),
    },
    "permutation": {
        "spec": set(),
        "layers": set(),
        "sketch": {"spec", "layers"},
        "blocks": {"spec", "layers", "sketch"},
        "families": {"blocks"},
        "operations": {"layers", "sketch"},
        "tracing": {"spec", "layers", "sketch", "families", "operations"},
        "drawing": {"spec"},
        "gpu": {"spec", "drawing"},
        "sharded": {"drawing"},
        "moving": {"spec", "drawing", "gpu", "sharded"},
    },
}
FILES = [
    (room, path)
    for room, folders in EDGES.items()
    for path in sorted((SOURCE / "shuffled_dpsgd" / room).rglob("*.py"))
    if module_of(path).split(".")[2:3] and module_of(path).split(".")[2] in folders
]


@pytest.mark.parametrize(
    ("room", "path"), FILES, ids=[str(p.relative_to(SOURCE)) for _, p in FILES]
)
def test_parts_depend_one_way(room: str, path: Path) -> None:
    folder = module_of(path).split(".")[2]
    prefix = f"shuffled_dpsgd.{room}"
    for target in imports_of(path):
        others = target.split(".")[2:3] if target.startswith(prefix) else []
        assert all(other == folder or other in EDGES[room][folder] for other in others), (
            f"{room}/{folder} must not import {target}"
        )


def test_every_folder_is_listed() -> None:
    for room, folders in EDGES.items():
        found = {p.name for p in (SOURCE / "shuffled_dpsgd" / room).iterdir() if p.is_dir()}
        assert found - {"__pycache__"} <= folders.keys()
