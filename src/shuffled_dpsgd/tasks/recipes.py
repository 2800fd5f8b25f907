"""Recipes: runs that were tried on real data, each a preset whose scores docs/recipes.md has.

A recipe asks for a certified (proven) ε. Its settings are those of committed runs: `results` names
the file or the folder of records that holds them.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from shuffled_dpsgd.errors import InvalidArgumentError


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
                if value is not None:
                    raise InvalidArgumentError(
                        name, expected=f"nothing: {self.name} brings its own", got=value
                    )
            return found
        found["model"]["name"] = model or self.checkpoint
        found["data"] |= {"source": "hub"} if data is None else {"path": data}
        return found


_DIGITS = Recipe(
    name="recipe/digits",
    model="vit-digits",
    dataset_size=1437,
    num_labels=10,
    results="results/advice_digits.json",
    run={
        "task": "digits",
        "seed": 0,
        "model": {"name": "vit-digits"},
        "data": {"format": "digits"},
        "privacy": {"delta": 1e-4, "clip_norm": 1.0},
        "optimizer": {"learning_rate": 1e-2, "schedule": "cosine"},
        "training": {
            "expected_batch_size": 288,
            "epochs": 50,
            "physical_batch_size": 512,
            "evaluate_every": 5,
            "num_threads": 1,
        },
    },
)
_SST2 = Recipe(
    name="recipe/sst2-minilm",
    model="minilm-l6",
    checkpoint="sentence-transformers/all-MiniLM-L6-v2",
    dataset_size=67_349,
    num_labels=2,
    results="results/sst2",
    run={
        "task": "text-classification",
        "model": {},
        "data": {"format": "sst2", "max_length": 64},
        "privacy": {"delta": 7.424e-6, "clip_norm": 1.0},
        "optimizer": {"learning_rate": 1.5e-3, "schedule": "linear"},
        "training": {
            "expected_batch_size": 1000,
            "epochs": 3,
            "evaluate_every": 68,
            "precision": "bf16",
        },
    },
)
RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {recipe.name: recipe for recipe in (_DIGITS, _SST2)}
)
