"""What an audit has seen so far, on disk, so that a machine that goes away takes nothing with it.

A journal is a file of pickled items, each complete when it is written; the first says where and
when. It is read by the audit that wrote it and by nobody else: unpickling runs code, so a journal
from a stranger is not to be opened.
"""

from __future__ import annotations

import pickle
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from shuffled_dpsgd.environment import environment
from shuffled_dpsgd.errors import InvalidArgumentError


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Which machine wrote, and for how many seconds until its last item."""

    device: str
    environment: dict[str, Any]
    started: float
    seconds: float = 0.0


class Journal:
    """Appends items to one file; a half-written last item is left out when it is read."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        path.unlink(missing_ok=True)
        self._started = time.time()
        origin = Origin(
            device=device_name(), environment=dict(environment()), started=self._started
        )
        self._write(origin)

    def add(self, item: Any) -> None:
        self._write((time.time() - self._started, item))

    def _write(self, value: Any) -> None:
        with self._path.open("ab") as file:
            pickle.dump(value, file)


def device_name() -> str:
    """What the audit runs on."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def read_journals(folder: Path, stem: str) -> tuple[Origin, list[Any]]:
    """The items of all journals of one audit, and the origin of the one that wrote longest."""
    origins, items = [], []
    for path in sorted(folder.glob(f"{stem}*.journal")):
        origin, *written = _values(path)
        seconds = max((after for after, _ in written), default=0.0)
        origins.append(replace(origin, seconds=seconds))
        items += [item for _, item in written]
    if not items:
        raise InvalidArgumentError(
            "--finish", expected=f"journals of {stem} with something in them", got=str(folder)
        )
    return max(origins, key=lambda origin: origin.seconds), items


def _values(path: Path) -> list[Any]:
    found = []
    with path.open("rb") as file:
        while True:
            try:
                found.append(pickle.load(file))
            except (EOFError, pickle.UnpicklingError):
                return found
