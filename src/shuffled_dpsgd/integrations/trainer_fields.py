"""What becomes of each field of the Trainer's arguments; the table is `trainer_fields.toml`.

Many fields silently change what one record contributes, or how often it is seen. A default is never
refused, only a value that the user has set.
"""

from __future__ import annotations

import copy
import inspect
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, Literal

from transformers.trainer_pt_utils import AcceleratorConfig

from shuffled_dpsgd.errors import require
from shuffled_dpsgd.runtime.notices import say_once

# Two names for one setting: transformers 5.23 has both, earlier releases the second.
_CHECKPOINTING = ("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs")
_NOT_CHECKPOINTED = {
    "use_reentrant": "reentrant checkpointing runs backward inside backward",
    "selective": "it has not been tested with per-sample gradients: leave it out",
}
_UNKNOWN = "this release does not know what the field does to a record: leave it out"


@dataclass(frozen=True, kw_only=True)
class FieldRule:
    """One line of the table, whose head explains the words."""

    word: Literal["used", "inert", "set", "refused"]
    value: Any = None
    only: tuple[Any, ...] = ()
    remedy: str = ""


@cache
def decisions() -> Mapping[str, FieldRule]:
    """The table."""
    text = Path(__file__).with_name("trainer_fields.toml").read_text(encoding="utf-8")
    lines = {k: v if isinstance(v, dict) else {"word": v} for k, v in tomllib.loads(text).items()}
    return {k: FieldRule(**v | {"only": tuple(v.get("only", ()))}) for k, v in lines.items()}


def settled(args: Any) -> Any:
    """A copy of the Trainer's arguments with the fields set that private training needs otherwise.

    Raises:
        InvalidArgumentError: for the first field that training cannot honour as it was given.
    """
    args, changed = copy.copy(args), []
    for item in fields(args):
        name, got, default = item.name, getattr(args, item.name), repr(_default(item))
        rule, asked = decisions().get(name), _was_asked_for(item, got)
        if rule is None:
            require(not (asked and _is_of_a_library(args, name)), name, default, got, _UNKNOWN)
        elif rule.word == "refused":
            require(not asked, name, default, got, rule.remedy)
        elif rule.only:
            for each in got if isinstance(got, list | tuple) else [got]:
                require(each in rule.only, name, f"one of {rule.only}", each, rule.remedy)
        elif rule.word == "set" and got != rule.value:
            require(not asked, name, repr(rule.value), got, rule.remedy)
            setattr(args, name, rule.value)
            changed.append(f"{name} is set to {rule.value} ({rule.remedy})")
    if changed:
        say_once("; ".join(changed))
    for name in _CHECKPOINTING:
        given = getattr(args, name, None) or {}
        for key, remedy in _NOT_CHECKPOINTED.items():
            require(not given.get(key), name, f"{key}=False", given, remedy)
    return args


def _is_of_a_library(args: Any, name: str) -> bool:
    """Whether transformers or TRL brought a field, and not a class of the user's own."""
    owners = [kind for kind in type(args).__mro__ if name in inspect.get_annotations(kind)]
    return bool(owners) and owners[-1].__module__.startswith(("transformers.", "trl."))


def _default(item: Any) -> Any:
    if item.name == "accelerator_config":
        return AcceleratorConfig()
    return item.default_factory() if item.default_factory is not MISSING else item.default


def _was_asked_for(item: Any, got: Any) -> bool:
    """Whether a field was changed; None, False, 0.0 and empty count as one value, a 0 does not."""
    default = _default(item)
    return got != default and bool(got or default or type(got) is int)
