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

from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.runtime.notices import say_once

# Two names for one setting: transformers 5.23 has both, earlier releases the second.
_CHECKPOINTING = ("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs")
_NOT_CHECKPOINTED = {
    "use_reentrant": "reentrant checkpointing runs backward inside backward",
    "selective": "it has not been tried with per-sample gradients: leave it out",
}


@dataclass(frozen=True, kw_only=True)
class FieldRule:
    """What is made of a field; see the head of the table."""

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
    """A copy of the Trainer's arguments in which what must differ is set.

    Raises:
        InvalidArgumentError: for the first field with a value that training cannot honour.
    """
    args, changed = copy.copy(args), []
    for item in fields(args):
        decision, got = decisions().get(item.name), getattr(args, item.name)
        if decision is None:
            _refuse_unknown(args, item, got)
        elif decision.word == "refused" and _was_asked_for(item, got):
            raise _refusal(item.name, repr(_default(item)), got, decision.remedy)
        elif decision.only:
            several = got if isinstance(got, list | tuple) else [got]
            odd = [each for each in several if each not in decision.only]
            if odd:
                raise _refusal(item.name, f"one of {decision.only}", odd[0], decision.remedy)
        elif decision.word == "set" and got != decision.value:
            if _was_asked_for(item, got):
                raise _refusal(item.name, repr(decision.value), got, decision.remedy)
            setattr(args, item.name, decision.value)
            changed.append(f"{item.name} is set to {decision.value} ({decision.remedy})")
    if changed:
        say_once("; ".join(changed))
    _check_checkpointing(args)
    return args


def _refuse_unknown(args: Any, item: Any, got: Any) -> None:
    """Fields that a user's own class adds are the user's; those of a newer release are unknown."""
    owners = [kind for kind in type(args).__mro__ if item.name in inspect.get_annotations(kind)]
    theirs = owners and owners[-1].__module__.startswith(("transformers.", "trl."))
    if theirs and _was_asked_for(item, got):
        remedy = "this release does not know what it does to a record: leave it out"
        raise _refusal(item.name, repr(_default(item)), got, remedy)


def _check_checkpointing(args: Any) -> None:
    for name in _CHECKPOINTING:
        given = getattr(args, name, None) or {}
        for key, remedy in _NOT_CHECKPOINTED.items():
            if given.get(key):
                raise _refusal(name, f"{key}=False", given, remedy)


def _default(item: Any) -> Any:
    if item.name == "accelerator_config":
        return AcceleratorConfig()
    return item.default_factory() if item.default_factory is not MISSING else item.default


def _was_asked_for(item: Any, got: Any) -> bool:
    """Whether a field has another value than its default; None, False and empty count as one."""
    default = _default(item)
    return got != default and bool(got or default)


def _refusal(name: str, expected: str, got: Any, remedy: str) -> InvalidArgumentError:
    return InvalidArgumentError(name, expected=expected, got=got, remedy=remedy)
