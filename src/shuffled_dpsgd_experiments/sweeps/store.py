"""Results on disk: one JSON per cell, written whole or not at all, never written twice."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from shuffled_dpsgd.errors import CheckpointError
from shuffled_dpsgd_experiments.sweeps.grid import Cell


class Store:
    """The folder of a sweep's results."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def find(self, cell: Cell) -> dict[str, Any] | None:
        """The result of a cell, if it was run before."""
        path = self.directory / cell.file_name
        if not path.is_file():
            return None
        try:
            found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise CheckpointError(
                f"{path}: not a cell's result; {error}. Move it away to run the cell again"
            ) from error
        return found

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
