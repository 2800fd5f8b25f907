"""Results on disk: one JSON per cell, written whole or not at all, never written twice.

Processes that share a folder claim a cell before they run it. A claim is a lock of the operating
system on a hidden file, so it ends with the process that holds it, however that ends.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shuffled_dpsgd.errors import CheckpointError
from shuffled_dpsgd_experiments.sweeps.grid import Cell

# What every table needs of a cell.
_KEYS = frozenset(
    {"method", "epsilon", "seed", "tuned", "score_name", "score", "certified", "paper"}
)


def read_record(path: Path) -> dict[str, Any]:
    """A cell's result.

    Raises:
        CheckpointError: the file is damaged, or it holds something else.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        why = str(error)
    else:
        missing = sorted(_KEYS - found.keys()) if isinstance(found, dict) else sorted(_KEYS)
        if not missing:
            return dict(found)
        why = f"it lacks {', '.join(missing)}"
    raise CheckpointError(f"{path}: not a cell's result; {why}. Move it away to run the cell again")


def read_records(directory: Path, stage: str = "main") -> list[dict[str, Any]]:
    """Every result of a stage in a folder, in the order of their names."""
    return [read_record(path) for path in sorted(directory.glob(f"{stage}_*.json"))]


class Store:
    """The folder of a sweep's results."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._found: dict[str, dict[str, Any]] = {}

    def find(self, cell: Cell) -> dict[str, Any] | None:
        """The result of a cell, if it was run before.

        A result of older code counts too, although its seed drew other noise; it is not run again.
        """
        for name in (cell.file_name, cell.older_name):
            if name not in self._found and (self.directory / name).is_file():
                self._found[name] = read_record(self.directory / name)
            if name in self._found:
                return self._found[name]
        return None

    @contextmanager
    def claim(self, cell: Cell) -> Iterator[bool]:
        """Whether the cell is this process's to run: not another's, and without a result yet."""
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.directory / f".{cell.file_name}.claim"
        with path.open("a") as file:
            if not _locked(file.fileno(), path):
                yield False
                return
            try:
                yield self.find(cell) is None
            finally:
                path.unlink()

    def add(self, cell: Cell, record: dict[str, Any]) -> Path:
        """Write a result. A file that appears only when it is complete survives any kill.

        Raises:
            CheckpointError: the cell has a result already; another process may be running it.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.directory / cell.file_name
        text = json.dumps(record, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(text, encoding="utf-8")
        try:
            os.link(temporary, path)
        except FileExistsError as error:
            raise CheckpointError(
                f"{path}: the cell has a result already, which is never overwritten"
            ) from error
        finally:
            temporary.unlink()
        return path


def _locked(descriptor: int, path: Path) -> bool:
    """Lock an open file, unless another process has it or its owner has just removed it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except (BlockingIOError, FileNotFoundError):
        return False
