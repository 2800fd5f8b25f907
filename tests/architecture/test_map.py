"""`docs/map.md` has one line for every file of `src`, and none for anything else."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from architecture.test_imports import ALLOWED, SOURCE

MAP = SOURCE.parent / "docs" / "map.md"
# A line of a list for a file, a heading for a folder; what follows says what it holds.
FILE = re.compile(r"^- \[`([\w.]+)`\]\(\.\./src/([^)]+)\): \S.*[.?]$")
FOLDER = re.compile(r"^#+ \[`[^`]+/`\]\(\.\./src/([^)]+)/\)$")


def files() -> set[str]:
    """Modules, without the `__init__.py` that the line of their folder describes."""
    found = (path for path in SOURCE.rglob("*.py") if path.name != "__init__.py")
    return {path.relative_to(SOURCE).as_posix() for path in found}


def folders() -> set[str]:
    return {path.parent.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("__init__.py")}


def test_every_file_has_its_line() -> None:
    lines = [line for line in MAP.read_text().splitlines() if line.startswith("- ")]
    matches = [FILE.match(line) for line in lines]
    assert [line for line, match in zip(lines, matches, strict=True) if match is None] == []
    paths = Counter(match[2] for match in matches if match is not None)
    assert [path for path, count in paths.items() if count > 1] == []
    assert paths.keys() - files() == set(), "files that do not exist"
    assert files() - paths.keys() == set(), "files without a line"
    assert all(Path(match[2]).name == match[1] for match in matches if match is not None)


def test_every_folder_has_its_heading() -> None:
    found = [match[1] for line in MAP.read_text().splitlines() if (match := FOLDER.match(line))]
    assert sorted(found) == sorted(folders())


def test_files_stand_under_their_folder() -> None:
    folder = ""
    for line in MAP.read_text().splitlines():
        if line.startswith("#"):
            heading = FOLDER.match(line)
            folder = heading[1] if heading else "."
        elif match := FILE.match(line):
            assert Path(match[2]).parent.as_posix() == folder, match[2]


def test_the_overview_names_every_room() -> None:
    rows = re.findall(r"^\| `(\w+)(?:\.py|/)` \|", MAP.with_name("overview.md").read_text(), re.M)
    rooms = {row.removeprefix("shuffled_dpsgd_") for row in rows}
    assert ALLOWED.keys() - rooms == set()
