"""What an audit has seen so far, on disk, so that a machine that goes away takes nothing with it.

A journal is a file of JSON lines, each complete when it is written; the first says where and when.
Dataclasses and enumerations of this project and arrays are written by name and content. Reading one
builds those and nothing else, whoever wrote it.
"""

from __future__ import annotations

import base64
import importlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shuffled_dpsgd.environment import environment
from shuffled_dpsgd.errors import CheckpointError, InvalidArgumentError

_OURS = ("shuffled_dpsgd", "shuffled_dpsgd_experiments")


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
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(_plain(value)) + "\n")


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
    try:
        *complete, _torn = path.read_text(encoding="utf-8").split("\n")
        return [_restored(json.loads(line)) for line in complete]
    except (ValueError, TypeError, KeyError, AttributeError, ImportError) as error:
        raise CheckpointError(f"{path}: not a journal of an audit; {error}") from error


def _plain(value: Any) -> Any:
    """`value` as JSON has it; what JSON has no word for, as an object with one marked key."""
    if isinstance(value, np.ndarray):
        text = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
        return {"$array": [value.dtype.str, list(value.shape), text]}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Enum):
        return {"$class": [type(value).__module__, type(value).__qualname__], "value": value.value}
    if is_dataclass(value) and not isinstance(value, type):
        kind = type(value)
        content = {item.name: _plain(getattr(value, item.name)) for item in fields(value)}
        return {"$class": [kind.__module__, kind.__qualname__], "fields": content}
    if isinstance(value, tuple):
        return {"$tuple": [_plain(item) for item in value]}
    if isinstance(value, Mapping):
        return {"$dict": [[_plain(key), _plain(item)] for key, item in value.items()]}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise InvalidArgumentError(
        "journal", expected="dataclasses, arrays and plain data", got=type(value).__name__
    )


def _restored(value: Any) -> Any:
    """The inverse of `_plain`; a class that is no dataclass of this project is refused."""
    if isinstance(value, list):
        return [_restored(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "$tuple" in value:
        return tuple(_restored(item) for item in value["$tuple"])
    if "$dict" in value:
        return {_restored(key): _restored(item) for key, item in value["$dict"]}
    if "$array" in value:
        kind, shape, content = value["$array"]
        return np.frombuffer(base64.b64decode(content), dtype=np.dtype(kind)).reshape(shape).copy()
    module, name = value["$class"]
    if module.split(".")[0] not in _OURS:
        raise ValueError(f"{module}.{name} is not of this project")
    kind = getattr(importlib.import_module(module), name)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind(value["value"])
    if not (isinstance(kind, type) and is_dataclass(kind)):
        raise ValueError(f"{module}.{name} is no dataclass")
    return kind(**{key: _restored(item) for key, item in value["fields"].items()})
