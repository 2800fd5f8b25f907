"""What a task is: a model, data to train on, a loss per sample and a held-out score."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shuffled_dpsgd.training.data import MapStyle
from shuffled_dpsgd.training.loop import Augment
from shuffled_dpsgd.training.units import Units

if TYPE_CHECKING:
    from shuffled_dpsgd.tasks.config import RunConfig


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Held-out results; computed without the training data, so free of privacy cost.

    For classifiers `baseline` is the score of always answering the commonest held-out class, and
    `predicted_classes` the number of classes the model answered.
    """

    loss: float
    score: float
    baseline: float | None = None
    predicted_classes: int | None = None


@dataclass(frozen=True, kw_only=True)
class Task:
    """Everything a training run needs besides its privacy plan and optimizer.

    `losses(model, batch)` returns one loss per sample, shape (B,). `evaluations` has a function for
    each held-out split; `heldout_data` is the first split. `collate` makes a batch of a list of
    samples; None is torch's default. `augment(batch, generator)` changes a batch before `losses`
    is called. `save_assets` writes what belongs beside the weights, such as a tokenizer, into a
    folder. `evaluate_texts` generates texts and scores them. `fresh_model(seed)` builds the model
    again with other initial weights. `units` has the records of every unit, where units are drawn.
    """

    name: str
    model: nn.Module
    train_data: MapStyle
    losses: Callable[[nn.Module, Any], torch.Tensor]
    score_name: str
    fresh_model: Callable[[int], nn.Module]
    evaluations: Mapping[str, Callable[[nn.Module], Evaluation]]
    heldout_data: MapStyle = ()
    collate: Callable[[list[Any]], Any] | None = None
    save_assets: Callable[[Any], None] | None = None
    evaluate_texts: Callable[[nn.Module], dict[str, Any]] | None = None
    augment: Augment | None = None
    units: Units | None = None

    @property
    def dataset_size(self) -> int:
        """How many may be drawn: records, or units."""
        return len(self.train_data) if self.units is None else len(self.units)

    def evaluate(self, model: nn.Module) -> Evaluation:
        """What `model` scores on the first held-out split."""
        return next(iter(self.evaluations.values()))(model)


def build_task(config: RunConfig) -> Task:
    """Load the data, check them, and load the model."""
    from shuffled_dpsgd.tasks import digits, images, text

    builders: dict[str, Callable[[RunConfig], Task]] = {
        "digits": digits.build_task,
        "image-classification": images.build_task,
        "text-classification": text.build_classification,
        "causal-lm": text.build_causal_lm,
        "sft": text.build_sft,
        "image-folder": images.build_task,
    }
    return builders[config.task](config)
