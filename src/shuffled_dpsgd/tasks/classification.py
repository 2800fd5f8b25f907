"""Classifying images and texts: classes that are stated, cross entropy per sample, accuracy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, default_collate

from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.integrations.per_sample_loss import classification_losses
from shuffled_dpsgd.tasks.config import DataConfig
from shuffled_dpsgd.tasks.data.loading import Splits
from shuffled_dpsgd.tasks.data.published import PUBLISHED
from shuffled_dpsgd.tasks.task import Evaluation, Task
from shuffled_dpsgd.training.data import MapStyle, to_device

_EVALUATION_BATCH = 256
_NAMES = {name: facts.classes for name, facts in PUBLISHED.items()}
_NAMES["digits"] = tuple("0123456789")
Collate = Callable[[list[Any]], Any] | None


def classification_task(
    name: str,
    model: nn.Module,
    splits: Splits[Any],
    *,
    fresh_model: Callable[[int], nn.Module],
    collate: Collate = None,
    **more: Any,
) -> Task:
    """A task from samples that collate to `(inputs, labels)`; `more` goes to `Task`.

    `inputs` is a tensor, or a dictionary of keyword arguments for the model. Logits may be
    (B, classes), or (B, K, classes) for K views of each record, whose losses are averaged.
    """
    return Task(
        name=name,
        model=model,
        train_data=splits.train,
        losses=_losses,
        evaluations={
            split: partial(evaluate_accuracy, heldout=heldout, collate=collate)
            for split, heldout in splits.heldout.items()
        },
        heldout_data=next(iter(splits.heldout.values())),
        score_name="accuracy",
        fresh_model=fresh_model,
        collate=collate,
        **more,
    )


def stated_classes(data: DataConfig) -> int:
    """The number of classes that the configuration states, or that is known of the data set.

    The number is published with the model. Counting it in the private records could reveal that a
    class has a single record.
    """
    known = len(_NAMES.get(data.format, ())) or None
    chosen = data.num_labels if data.num_labels is not None else len(data.label_names) or known
    if chosen is None:
        raise InvalidArgumentError(
            "data.num_labels",
            expected=f"the number of classes, stated, for data.format {data.format!r}",
            got=None,
            remedy="counted in the private records it would be released without noise: write "
            "`num_labels = …` or `label_names = […]` under [data]",
        )
    if chosen < 2 or known not in (None, chosen):
        expected = "at least 2" if known is None else f"{known}, as {data.format} has"
        raise InvalidArgumentError("data.num_labels", expected=expected, got=chosen)
    return chosen


def name_classes(model: Any, data: DataConfig, num_labels: int) -> None:
    """Write the classes' names into the model's configuration, where pipelines read them."""
    names = data.label_names or _NAMES.get(data.format, ())
    if not names:
        return
    if len(names) != num_labels or len(set(names)) != num_labels:
        raise InvalidArgumentError(
            "data.label_names", expected=f"{num_labels} different names", got=list(names)
        )
    model.config.id2label = dict(enumerate(names))
    model.config.label2id = {name: index for index, name in enumerate(names)}


def _logits(model: nn.Module, inputs: Any) -> torch.Tensor:
    """The model's logits, for plain modules and for Hugging Face outputs alike."""
    outputs = model(**inputs) if isinstance(inputs, dict) else model(inputs)
    return outputs if isinstance(outputs, torch.Tensor) else outputs.logits


def _losses(model: nn.Module, batch: Any) -> torch.Tensor:
    inputs, labels = batch
    logits = _logits(model, inputs)
    if logits.dim() == 2:
        return classification_losses(logits, labels)
    views = logits.shape[1]
    losses = classification_losses(logits.flatten(0, 1), labels.repeat_interleave(views))
    return losses.unflatten(0, (-1, views)).mean(1)


def heldout_batches(model: nn.Module, heldout: MapStyle, collate: Collate) -> Iterator[Any]:
    """Held-out batches on the model's device; it is in evaluation mode until the last is used."""
    device, was_training = next(model.parameters()).device, model.training
    model.eval()
    data: Any = heldout
    for batch in DataLoader(data, _EVALUATION_BATCH, collate_fn=collate or default_collate):
        yield to_device(batch, device)
    model.train(was_training)


@torch.no_grad()
def evaluate_accuracy(
    model: nn.Module, heldout: MapStyle, *, collate: Collate = None
) -> Evaluation:
    """Mean loss and accuracy on held-out data, in evaluation mode; the mode is put back."""
    total_loss, correct, count = 0.0, 0, 0
    seen: Counter[int] = Counter()
    answered: set[int] = set()
    for inputs, labels in heldout_batches(model, heldout, collate):
        logits = _logits(model, inputs)
        total_loss += classification_losses(logits, labels).sum().item()
        answers = logits.argmax(dim=-1)
        correct += int((answers == labels).sum())
        count += len(labels)
        seen.update(labels.tolist())
        answered.update(answers.tolist())
    return Evaluation(
        loss=total_loss / count,
        score=correct / count,
        baseline=max(seen.values()) / count,
        predicted_classes=len(answered),
    )
