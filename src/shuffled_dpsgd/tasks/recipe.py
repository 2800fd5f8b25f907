"""What the method `certified` decides of a run where its file is silent, and how that is told.

Each part was measured, and docs/ingredients.md has the tables: a learning rate that falls linearly
to zero, and the input embeddings of a pretrained text classifier as they are. A key that a file
states is never changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from shuffled_dpsgd.models import weights_of
from shuffled_dpsgd.tasks.embeddings import find_input_embeddings

if TYPE_CHECKING:
    from shuffled_dpsgd.tasks.config import RunConfig

METHOD = "certified"
AVERAGING = 0.95
"""Decay of the average of weights that stands in for a falling rate, where a file forbids one."""
_SAYS_WHAT_TRAINS = ("freeze", "train_only", "embeddings", "lora_rank")
_SECTIONS = ("model", "privacy", "training", "optimizer")
_MILLION = 1_000_000


def with_recipe(raw: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Plain data with the method's choices filled in, and the dotted keys that it chose."""
    top = dict(raw)
    tables = {name: top.get(name, {}) for name in _SECTIONS}
    # What is no table is refused elsewhere, with its name.
    if not all(isinstance(table, Mapping) for table in tables.values()):
        return top, ()
    if tables["privacy"].get("method") != METHOD:
        return top, ()
    chosen = {**_rate_or_average(tables), **_embeddings(top.get("task"), tables["model"])}
    for key, value in chosen.items():
        section, _, name = key.partition(".")
        top[section] = {**top.get(section, {}), name: value}
    return top, tuple(chosen)


def _rate_or_average(tables: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """A falling rate where nothing is said; where a constant one is wanted, averaged weights."""
    averages = "weight_averaging" in tables["training"]
    schedule = tables["optimizer"].get("schedule")
    if schedule is None and not averages:
        return {"optimizer.schedule": "linear"}
    if schedule == "constant" and not averages:
        return {"training.weight_averaging": AVERAGING}
    return {}


def _embeddings(task: Any, model: Mapping[str, Any]) -> dict[str, Any]:
    """Only weights that were learnt elsewhere are worth keeping as they are."""
    name = model.get("name")
    if task != "text-classification" or not isinstance(name, str) or model.get("from_scratch"):
        return {}
    if any(key in model for key in _SAYS_WHAT_TRAINS) or weights_of(name) is None:
        return {}
    return {"model.embeddings": "freeze-if-found"}


def describe_choices(config: RunConfig, model: nn.Module) -> str | None:
    """What the method chose for a run of `model`, in words; None where it chose nothing."""
    parts = []
    if "optimizer.schedule" in config.by_method:
        parts.append(f"{config.optimizer.schedule} schedule")
    if "training.weight_averaging" in config.by_method:
        parts.append(f"weights averaged with decay {config.training.weight_averaging:g}")
    if "model.embeddings" in config.by_method:
        parts.append(_embeddings_in_words(model))
    return f"{config.privacy.method}: {', '.join(parts)}" if parts else None


def _embeddings_in_words(model: nn.Module) -> str:
    found = find_input_embeddings(model)
    if found.why_not is not None:
        return f"all weights trained, no embeddings frozen ({found.why_not})"
    total = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    if total < _MILLION:
        share = f"{trained:,} of {total:,} weights trained"
    else:
        share = f"{trained / _MILLION:.1f} of {total / _MILLION:.1f} million weights trained"
    return f"embeddings frozen ({share})"
