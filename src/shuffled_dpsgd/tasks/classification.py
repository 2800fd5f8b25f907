"""Image and sequence classification: cross entropy per sample, accuracy on held-out data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, default_collate

from shuffled_dpsgd.integrations.per_sample_loss import classification_losses
from shuffled_dpsgd.tasks.data.loading import Splits
from shuffled_dpsgd.tasks.task import Evaluation, Task
from shuffled_dpsgd.training.data import MapStyle, to_device
from shuffled_dpsgd.training.loop import Augment

EVALUATION_BATCH = 256


def classification_task(
    name: str,
    model: nn.Module,
    splits: Splits[Any],
    *,
    fresh_model: Callable[[int], nn.Module],
    collate: Callable[[list[Any]], Any] | None = None,
    save_assets: Callable[[Any], None] | None = None,
    augment: Augment | None = None,
) -> Task:
    """A task from samples that collate to `(inputs, labels)`.

    `inputs` is a tensor, or a dictionary of keyword arguments for the model. Logits may be
    (B, classes), or (B, K, classes) for K views of each record, whose losses are averaged.
    """
    evaluations = {
        split: partial(evaluate_accuracy, heldout=heldout, collate=collate)
        for split, heldout in splits.heldout.items()
    }
    return Task(
        name=name,
        model=model,
        train_data=splits.train,
        losses=_losses,
        evaluate=next(iter(evaluations.values())),
        evaluations=evaluations,
        heldout_data=next(iter(splits.heldout.values())),
        score_name="accuracy",
        fresh_model=fresh_model,
        collate=collate,
        save_assets=save_assets,
        augment=augment,
    )


def logits_of(model: nn.Module, inputs: Any) -> torch.Tensor:
    """The model's logits, for plain modules and for Hugging Face outputs alike."""
    outputs = model(**inputs) if isinstance(inputs, dict) else model(inputs)
    return outputs if isinstance(outputs, torch.Tensor) else outputs.logits


def _losses(model: nn.Module, batch: Any) -> torch.Tensor:
    inputs, labels = batch
    logits = logits_of(model, inputs)
    if logits.dim() == 2:
        return classification_losses(logits, labels)
    views = logits.shape[1]
    losses = classification_losses(logits.flatten(0, 1), labels.repeat_interleave(views))
    return losses.unflatten(0, (-1, views)).mean(1)


def heldout_batches(
    model: nn.Module, heldout: MapStyle, collate: Callable[[list[Any]], Any] | None
) -> Iterator[Any]:
    """Held-out batches on the model's device, in order."""
    device = next(model.parameters()).device
    loader: DataLoader[Any] = DataLoader(
        heldout,  # type: ignore[arg-type]  # any map-style data set will do
        batch_size=EVALUATION_BATCH,
        collate_fn=collate or default_collate,
    )
    for batch in loader:
        yield to_device(batch, device)


@torch.no_grad()
def evaluate_accuracy(
    model: nn.Module,
    heldout: MapStyle,
    *,
    collate: Callable[[list[Any]], Any] | None = None,
) -> Evaluation:
    """Mean loss and accuracy on held-out data, in evaluation mode; the mode is put back."""
    was_training = model.training
    model.eval()
    total_loss, correct, count = 0.0, 0, 0
    seen: Counter[int] = Counter()
    answered: set[int] = set()
    for inputs, labels in heldout_batches(model, heldout, collate):
        logits = logits_of(model, inputs)
        total_loss += classification_losses(logits, labels).sum().item()
        answers = logits.argmax(dim=-1)
        correct += int((answers == labels).sum())
        count += len(labels)
        seen.update(labels.tolist())
        answered.update(answers.tolist())
    model.train(was_training)
    return Evaluation(
        loss=total_loss / count,
        score=correct / count,
        baseline=max(seen.values()) / count,
        predicted_classes=len(answered),
    )
