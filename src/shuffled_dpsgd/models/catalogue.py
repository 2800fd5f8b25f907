"""Every model that has a short name, as `catalogue.toml` states it."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

Head = Literal["sequence", "image", "causal-lm"]
_HEAD_OF_ENDING: Mapping[str, Head] = {
    "ForSequenceClassification": "sequence",
    "ForImageClassification": "image",
    "ForCausalLM": "causal-lm",
    "LMHeadModel": "causal-lm",
}


@dataclass(frozen=True, kw_only=True)
class NamedModel:
    """An architecture of transformers, with the settings that are not its defaults."""

    architecture: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    checkpoint: str | None = None

    @property
    def head(self) -> Head | None:
        """The head of the model, if it is one that tasks train."""
        return head_of(self.architecture)

    @property
    def config_class(self) -> str:
        """The class of its configuration.

        >>> NamedModel(architecture="GPT2LMHeadModel").config_class
        'GPT2Config'
        """
        return re.sub("(For|LMHead).*", "Config", self.architecture)


def head_of(architecture: str) -> Head | None:
    """The head of a model of this class, if it is one that tasks train.

    >>> head_of("GPT2LMHeadModel"), head_of("ViTForImageClassification"), head_of("ViTModel")
    ('causal-lm', 'image', None)
    """
    endings = (head for end, head in _HEAD_OF_ENDING.items() if architecture.endswith(end))
    return next(endings, None)


def find_named(name: str) -> NamedModel | None:
    """The model with this short name, or with this checkpoint on the hub."""
    if name in CATALOGUE:
        return CATALOGUE[name]
    return next((m for m in CATALOGUE.values() if name and m.checkpoint == name), None)


_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
CATALOGUE = MappingProxyType({name: NamedModel(**table) for name, table in _TABLES.items()})
