"""What a task is: a model, data to train on, a loss per sample and a held-out score."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from shuffled_dpsgd.training.data import MapStyle
from shuffled_dpsgd.training.loop import Augment


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

    `losses(model, batch)` returns one loss per sample, shape (B,); `evaluate(model)` sees only
    held-out data: `heldout_data`, the first split where there are several. `evaluations` has a
    function for each split, by its name. `collate` turns a list of samples of `train_data` into a
    batch, or is None for torch's default. `save_assets` writes what belongs beside the weights
    (configuration, tokenizer) into a folder. `evaluate_texts` lets a language model write texts and
    scores them.
    `fresh_model(seed)` builds the model once more, with initial weights from that seed; nothing
    else of a task depends on it. `augment(batch, generator)` is what training makes of a batch
    before `losses` sees it.
    """

    name: str
    model: nn.Module
    train_data: MapStyle
    losses: Callable[[nn.Module, Any], torch.Tensor]
    evaluate: Callable[[nn.Module], Evaluation]
    score_name: str
    fresh_model: Callable[[int], nn.Module]
    heldout_data: MapStyle = ()
    evaluations: Mapping[str, Callable[[nn.Module], Evaluation]] = field(default_factory=dict)
    collate: Callable[[list[Any]], Any] | None = None
    save_assets: Callable[[Any], None] | None = None
    evaluate_texts: Callable[[nn.Module], dict[str, Any]] | None = None
    augment: Augment | None = None
