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


# What the paper calls a model, ours, its checkpoint, its task and its printed size.
_MODELS: Mapping[str, tuple[str, str, str, Task, int]] = {
    "vit": ("ViT", "vit-base", "google/vit-base-patch16-224", "image-classification", 85_800_000),
    "bert": ("BERT", "bert-base", "bert-base-uncased", "text-classification", 110_000_000),
    "roberta": ("RoBERTa", "roberta-base", "roberta-base", "text-classification", 125_000_000),
    "gpt2": ("GPT-2", "gpt2", "gpt2", "causal-lm", 124_000_000),
    "gpt2-large": ("GPT-2-large", "gpt2-large", "gpt2-large", "causal-lm", 838_000_000),
}
# Title, N, learning rate, epochs, δ (None for 1/2N), clip norm and classes, by format.
_DATA: Mapping[str, tuple[str, int, float, int, float | None, float, int | None]] = {
    "cifar100": ("CIFAR-100", 50_000, 2e-3, 10, 5e-6, 1.0, 100),
    "sst2": ("SST-2", 67_349, 5e-4, 3, None, 0.1, 2),
    "qqp": ("QQP", 363_846, 5e-4, 18, None, 0.1, 2),
    "mnli": ("MNLI", 392_702, 5e-4, 18, None, 0.1, 3),
    "qnli": ("QNLI", 108_000, 5e-4, 6, None, 0.1, 2),
    "e2e": ("E2E", 42_043, 2e-3, 10, 8e-6, 0.1, None),
    "dart": ("DART", 60_591, 5e-4, 15, 1e-5, 0.1, None),
}
_TRAINED_ON = {
    "vit": ("cifar100",),
    "bert": ("sst2", "qqp", "mnli", "qnli"),
    "roberta": ("sst2", "qqp", "mnli", "qnli"),
    "gpt2": ("e2e", "dart"),
    "gpt2-large": ("e2e", "dart"),
}


def _preset(short: str, data_format: str) -> Preset:
    label, model, checkpoint, task, dimension = _MODELS[short]
    title, size, rate, epochs, delta, clip, classes = _DATA[data_format]
    return Preset(
        name=f"paper/{short}-{data_format}",
        label=f"{label}, {title}",
        model=model,
        checkpoint=checkpoint,
        task=task,
        data_format=data_format,
        dimension=dimension,
        dataset_size=size,
        learning_rate=rate,
        epochs=epochs,
        delta=1 / (2 * size) if delta is None else delta,
        clip_norm=clip,
        num_labels=classes,
    )


PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        preset.name: preset
        for short, formats in _TRAINED_ON.items()
        for preset in (_preset(short, each) for each in formats)
    }
)
VIT = PRESETS["paper/vit-cifar100"]
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
