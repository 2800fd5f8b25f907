"""The thirteen rows of the paper's Table 1, each a run that `train --preset` starts.

Values are as printed. The paper states neither the batch clip c' nor the optimizer; c' = c is what
its text implies, and AdamW with a constant learning rate is our choice. The noise of a preset is
calibrated by the paper's formula, whose ε is heuristic, because that is what it reproduces.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, TypedDict

from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.tasks.recipes import RECIPES, Recipe

BATCH_SIZE = 1000
PREFIX = "paper/"
PAPER_EPSILONS = (0.1, 0.5, 1.0)
Task = Literal["image-classification", "text-classification", "causal-lm"]


class AccountedSteps(TypedDict):
    """What every accountant needs to know of a setting."""

    delta: float
    sampling_prob: float
    num_steps: int


@dataclass(frozen=True, kw_only=True)
class Preset:
    """One model on one data set; T = epochs · ⌈N/B⌉ and q = B/N with B = 1000."""

    name: str
    label: str
    model: str
    checkpoint: str
    task: Task
    data_format: str
    dimension: int
    dataset_size: int
    learning_rate: float
    epochs: int
    delta: float
    clip_norm: float
    num_labels: int | None = None

    @property
    def sampling_prob(self) -> float:
        return BATCH_SIZE / self.dataset_size

    @property
    def num_steps(self) -> int:
        return self.epochs * math.ceil(self.dataset_size / BATCH_SIZE)

    @property
    def steps(self) -> AccountedSteps:
        return {
            "delta": self.delta,
            "sampling_prob": self.sampling_prob,
            "num_steps": self.num_steps,
        }

    @property
    def described(self) -> dict[str, Any]:
        """What a figure's data say of its setting."""
        names = ("label", "dimension", "dataset_size", "epochs", "delta")
        return {name: getattr(self, name) for name in names}

    def to_run(self, *, model: str | None = None, data: str | None = None) -> dict[str, Any]:
        """A run as a file would describe it, but for ε, which whoever runs it decides.

        `model` and `data` are folders; without them the checkpoint and the data come from the hub.
        """
        where = {"source": "hub"} if data is None else {"path": data}
        return {
            "task": self.task,
            "model": {"name": model or self.checkpoint},
            "data": {"format": self.data_format, **where},
            "privacy": {
                "method": "shuffled",
                "accounting": "paper",
                "delta": self.delta,
                "clip_norm": self.clip_norm,
                "batch_clip_norm": self.clip_norm,
            },
            "optimizer": {"learning_rate": self.learning_rate},
            "training": {
                "expected_batch_size": BATCH_SIZE,
                "epochs": self.epochs,
                "evaluate_every": math.ceil(self.dataset_size / BATCH_SIZE),
            },
        }


VIT = Preset(
    name="paper/vit-cifar100",
    label="ViT, CIFAR-100",
    model="vit-base",
    checkpoint="google/vit-base-patch16-224",
    task="image-classification",
    data_format="cifar100",
    dimension=85_800_000,
    dataset_size=50_000,
    learning_rate=2e-3,
    epochs=10,
    delta=5e-6,
    clip_norm=1.0,
    num_labels=100,
)
_GLUE = {
    # format: (name, N, epochs, classes)
    "sst2": ("SST-2", 67_349, 3, 2),
    "qqp": ("QQP", 363_846, 18, 2),
    "mnli": ("MNLI", 392_702, 18, 3),
    "qnli": ("QNLI", 108_000, 6, 2),
}
_ENCODERS = {
    "bert": ("BERT", "bert-base", "bert-base-uncased", 110_000_000),
    "roberta": ("RoBERTa", "roberta-base", "roberta-base", 125_000_000),
}
_NLG = {
    # format: (name, N, learning rate, epochs, δ)
    "e2e": ("E2E", 42_043, 2e-3, 10, 8e-6),
    "dart": ("DART", 60_591, 5e-4, 15, 1e-5),
}
_DECODERS = {"gpt2": ("GPT-2", 124_000_000), "gpt2-large": ("GPT-2-large", 838_000_000)}


def _classifiers() -> list[Preset]:
    return [
        Preset(
            name=f"paper/{short}-{data}",
            label=f"{label}, {title}",
            model=model,
            checkpoint=checkpoint,
            task="text-classification",
            data_format=data,
            dimension=dimension,
            dataset_size=size,
            learning_rate=5e-4,
            epochs=epochs,
            delta=1 / (2 * size),
            clip_norm=0.1,
            num_labels=classes,
        )
        for short, (label, model, checkpoint, dimension) in _ENCODERS.items()
        for data, (title, size, epochs, classes) in _GLUE.items()
    ]


def _language_models() -> list[Preset]:
    return [
        Preset(
            name=f"paper/{model}-{data}",
            label=f"{label}, {title}",
            model=model,
            checkpoint=model,
            task="causal-lm",
            data_format=data,
            dimension=dimension,
            dataset_size=size,
            learning_rate=rate,
            epochs=epochs,
            delta=delta,
            clip_norm=0.1,
        )
        for model, (label, dimension) in _DECODERS.items()
        for data, (title, size, rate, epochs, delta) in _NLG.items()
    ]


PRESETS: Mapping[str, Preset] = MappingProxyType(
    {preset.name: preset for preset in (VIT, *_classifiers(), *_language_models())}
)
# The six of figure 3. The paper names the models; the data sets of BERT, RoBERTa and GPT-2 are not
# stated, and these are the first of each in its tables.
SIX = tuple(
    PRESETS[f"paper/{name}"]
    for name in (
        "vit-cifar100", "bert-sst2", "roberta-sst2", "gpt2-e2e", "gpt2-large-e2e",
        "gpt2-large-dart",
    )
)  # fmt: skip


def find_preset(name: str) -> Preset | Recipe:
    """The preset or recipe of that name; refuses a name that is neither."""
    known: dict[str, Preset | Recipe] = {**PRESETS, **RECIPES}
    if name not in known:
        raise InvalidArgumentError("--preset", expected=f"one of {', '.join(known)}", got=name)
    return known[name]
