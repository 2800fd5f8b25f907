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


class Store:
    """The folder of a sweep's results."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._found: dict[str, dict[str, Any]] = {}

    def find(self, cell: Cell) -> dict[str, Any] | None:
        """The result of a cell, if it was run before."""
        path = self.directory / cell.file_name
        if cell.file_name in self._found:
            return self._found[cell.file_name]
        if not path.is_file():
            return None
        try:
            found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise CheckpointError(
                f"{path}: not a cell's result; {error}. Move it away to run the cell again"
            ) from error
        self._found[cell.file_name] = found
        return found

    @contextmanager
    def claim(self, cell: Cell) -> Iterator[bool]:
        """Whether the cell is this process's to run: not another's, and without a result yet."""
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.directory / f".{cell.file_name}.claim"
        with path.open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            if not _is_at(file.fileno(), path):  # Its owner has just removed it.
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


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether an open file is the one that a path names now."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
