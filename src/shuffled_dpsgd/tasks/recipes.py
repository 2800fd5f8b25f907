"""Recipes: presets that were tried on real data; their ε is certified (proven)."""

from __future__ import annotations

import copy
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from shuffled_dpsgd.errors import require


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One model on one data set; `run` is the run as a file describes it, but for ε.

    `checkpoint` is a hub name, and None for a model and data that come with the package.
    """

    name: str
    model: str
    dataset_size: int
    num_labels: int
    results: str
    run: Mapping[str, Any]
    checkpoint: str | None = None

    def to_run(self, *, model: str | None = None, data: str | None = None) -> dict[str, Any]:
        """The run with `model` and `data`, folders, in place of what the hub has."""
        found: dict[str, Any] = copy.deepcopy(dict(self.run))
        if self.checkpoint is None:
            for name, value in (("--model", model), ("--data", data)):
                require(value is None, name, f"nothing: {self.name} brings its own", value)
            return found
        found["model"]["name"] = model or self.checkpoint
        found["data"] |= {"source": "hub"} if data is None else {"path": data}
        return found


_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
RECIPES = MappingProxyType({name: Recipe(name=name, **table) for name, table in _TABLES.items()})
