"""Models by name: one catalogue and one loader for every verb, task and benchmark."""

from __future__ import annotations

from shuffled_dpsgd.models.catalogue import CATALOGUE, Head, NamedModel, find_named, head_of
from shuffled_dpsgd.models.loading import (
    build_model,
    checkpoint_activations,
    load_model,
    seeded,
    weights_of,
)

__all__ = [
    "CATALOGUE",
    "Head",
    "NamedModel",
    "build_model",
    "checkpoint_activations",
    "find_named",
    "head_of",
    "load_model",
    "seeded",
    "weights_of",
]
