"""Where the files of a named data set are, and what to put where if they are not."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.tasks.data.published import PUBLISHED
from shuffled_dpsgd.tasks.data.tables import first_file


def data_folders(name: str, path: Path) -> list[Path]:
    """The folder the user named, and those in it that are called as the set's archive calls it."""
    inside = [path / folder for folder in PUBLISHED[name].folders]
    return [path, *(folder for folder in inside if folder.is_dir())]


def find_file(name: str, path: Path, files: Sequence[str]) -> Path | None:
    """The first of `files` there is, packed or not, in the first folder that has any."""
    found = (first_file(folder, files) for folder in data_folders(name, path))
    return next((file for file in found if file is not None), None)


def missing_file(name: str, folder: Path, file: str) -> InvalidArgumentError:
    """The error about a file that is not there."""
    facts = PUBLISHED[name]
    packed = "" if file.endswith(".bin") else f" or {file}.xz"
    there = "" if folder.is_dir() else ", which is not there"
    return InvalidArgumentError(
        "data.path",
        expected=f"a folder with {file}{packed}, for {facts.title}",
        got=f"{folder}{there}",
        remedy=f'put there {facts.files} ({facts.source}), or write `source = "hub"`; a path in '
        "a file is relative to that file",
    )
