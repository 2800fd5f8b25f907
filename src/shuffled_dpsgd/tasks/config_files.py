"""From a TOML file to a `RunConfig`: every key known, every unknown key refused.

The method `certified` sets keys that a file does not state: a learning rate that falls linearly to
zero, and frozen input embeddings of a pretrained text classifier (docs/ingredients.md has the
measurements). A key that a file states is never changed.
"""

from __future__ import annotations

import difflib
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_type_hints

from shuffled_dpsgd.errors import InvalidArgumentError, require
from shuffled_dpsgd.models import weights_of
from shuffled_dpsgd.options.other_names import OTHER_NAMES
from shuffled_dpsgd.tasks.config import SECTIONS, USUAL_DATA, RunConfig, TaskName

AVERAGING = 0.95
"""Decay of the weight average that is used instead where a file states a constant rate."""
_SAYS_WHAT_TRAINS = ("freeze", "train_only", "embeddings", "lora_rank")
_OPTIONAL = ("generation",)
_TOP = {"task": TaskName, "seed": int}


def load_config(path: Path) -> RunConfig:
    """Read a TOML file; relative folders in it are relative to the file."""
    return parse_config(read_config(path))


def read_config(path: Path) -> dict[str, Any]:
    """What a TOML file states, unchecked; relative folders in it are relative to the file."""
    expected = "a TOML file"
    try:
        if not path.is_file():
            raise FileNotFoundError("check the path")
        expected = "TOML in UTF-8"
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise InvalidArgumentError(
            "--config", expected=expected, got=str(path), remedy=str(error)
        ) from error
    place_paths(raw, path.parent)
    return raw


def place_paths(raw: dict[str, Any], folder: Path) -> None:
    """Make relative paths relative to the file; what may be a hub name, only if it exists there."""
    for section, key in (("data", "path"), ("model", "name"), ("privacy", "budget")):
        table = raw.get(section)
        if not isinstance(table, dict) or not isinstance(table.get(key), str):
            continue
        place = (folder / Path(table[key]).expanduser()).resolve()
        may_be_name = section == "model" or "hub" in (table.get("format"), table.get("source"))
        written_as_path = table[key].startswith((".", "/", "~"))
        known = place / "config.json" if section == "model" else place
        if known.exists() or written_as_path or not may_be_name:
            table[key] = str(place)


def parse_config(raw: Mapping[str, Any]) -> RunConfig:
    """Check plain data against the schema and freeze it."""
    if not isinstance(raw, Mapping):
        raise InvalidArgumentError("run", expected="a table of settings", got=type(raw).__name__)
    top = dict(raw)
    given = {name: top.pop(name, {}) for name in SECTIONS if name in top or name not in _OPTIONAL}
    # Checked before missing keys, so that a misspelt key is reported as misspelt.
    refuse_unknown("", top, [*_TOP, *SECTIONS])
    for name, table in given.items():
        if not isinstance(table, Mapping):
            raise InvalidArgumentError(name, expected=f"a table [{name}]", got=table)
        refuse_unknown(f"{name}.", table, list(_hints_of(SECTIONS[name])))
    values = {key: _checked(key, _TOP[key], value) for key, value in top.items()}
    usual = USUAL_DATA.get(str(top.get("task")), {})
    given["data"] = {**usual, **given["data"]}
    chosen = _choices_of_method(top.get("task"), given)
    for place, value in chosen.items():
        section, key = place.split(".")
        given[section] = {**given[section], key: value}
    _refuse_missing(given)
    require("task" in top, "task", f"one of {get_args(TaskName)}", None)
    sections = {name: _section(name, table) for name, table in given.items()}
    return RunConfig(**values, **sections, by_method=tuple(chosen))


def refuse_unknown(prefix: str, raw: Mapping[str, Any], known: list[str]) -> None:
    """Refuse a key that is not known, with the one that was probably meant."""
    for key in raw:
        if key not in known:
            other = OTHER_NAMES.get(key)
            remedy = f"{key} is {other}" if other in known else _nearest(key, known)
            require(False, f"{prefix}{key}", f"one of {sorted(known)}", key, remedy)


def _choices_of_method(task: Any, tables: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """What the method chooses because a file does not state it, by dotted key."""
    if tables["privacy"].get("method") != "certified":
        return {}
    chosen: dict[str, Any] = {}
    schedule = tables["optimizer"].get("schedule")
    if "weight_averaging" not in tables["training"]:
        if schedule is None:
            chosen["optimizer.schedule"] = "linear"
        elif schedule == "constant":
            chosen["training.weight_averaging"] = AVERAGING
    model = tables["model"]
    name, silent = model.get("name"), not any(key in model for key in _SAYS_WHAT_TRAINS)
    # Only pretrained embeddings are worth freezing.
    reads = task == "text-classification" and not model.get("from_scratch")
    if reads and silent and isinstance(name, str) and weights_of(name) is not None:
        chosen["model.embeddings"] = "freeze-if-found"
    return chosen


@cache
def _hints_of(kind: type) -> dict[str, Any]:
    """The types of a section's keys; cached, because evaluating annotations is slow."""
    return get_type_hints(kind)


def _section(name: str, raw: Mapping[str, Any]) -> Any:
    hints = _hints_of(SECTIONS[name])
    values = {key: _checked(f"{name}.{key}", hints[key], value) for key, value in raw.items()}
    if values.get("method") == "non-private":
        values.setdefault("clip_norm", math.inf)
    try:
        return SECTIONS[name](**values)
    except InvalidArgumentError as error:
        raise error.about(f"{name}.{error.argument}") from error


def _refuse_missing(given: Mapping[str, Any]) -> None:
    """Name all required keys at once that a file lacks."""
    missing = [
        (name, item.name)
        for name, table in given.items()
        for item in fields(SECTIONS[name])
        if item.default is item.default_factory is MISSING and item.name not in table
        if (item.name, table.get("method")) != ("clip_norm", "non-private")
    ]
    if missing:
        section, key = missing[0]
        raise InvalidArgumentError(
            f"{section}.{key}",
            expected="a value",
            got=None,
            remedy="write " + ", ".join(f"`{key} = …` under [{name}]" for name, key in missing),
        )


def _nearest(word: Any, known: Sequence[str]) -> str:
    """A suggestion of what was probably meant, or nothing."""
    near = difflib.get_close_matches(word, known, n=1) if isinstance(word, str) else []
    return f"did you mean `{near[0]}`?" if near else ""


def _checked(name: str, hint: Any, value: Any) -> Any:
    """`value` if it is of the hinted type; integers may stand for floats, lists for tuples."""
    choices = get_args(hint)
    if type(None) in choices:
        (inner,) = [choice for choice in choices if choice is not type(None)]
        return _checked(name, inner, value)
    if choices and all(isinstance(choice, str) for choice in choices):
        if value not in choices:
            raise InvalidArgumentError(
                name, expected=f"one of {choices}", got=value, remedy=_nearest(value, choices)
            )
        return value
    if choices:
        if not isinstance(value, list | tuple) or not all(isinstance(v, str) for v in value):
            raise InvalidArgumentError(name, expected="a list of strings", got=value)
        return tuple(value)
    if hint is float and (value == "inf" or type(value) is int):
        return float(value)
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise InvalidArgumentError(name, expected=hint.__name__, got=value)
    return value
