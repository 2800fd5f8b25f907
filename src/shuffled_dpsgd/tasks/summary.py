"""What a run leaves for machines: weights and `summary.json`."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from safetensors.torch import save_model
from torch import nn

from shuffled_dpsgd import __version__
from shuffled_dpsgd.environment import environment, subject_of
from shuffled_dpsgd.reports import StepRecord, samples_per_second
from shuffled_dpsgd.runtime import backends
from shuffled_dpsgd.tasks.config import RunConfig
from shuffled_dpsgd.tasks.models import no_progress_bars
from shuffled_dpsgd.tasks.task import Task
from shuffled_dpsgd.training.card import PrivacyCard
from shuffled_dpsgd.training.loop import Outcome


def save_weights(task: Task, model: nn.Module, directory: Path) -> None:
    """Weights as safetensors; a Hugging Face model so that `from_pretrained` reads the folder.

    Low-rank factors are merged into the weights, in place: a shuffle moves the frozen weights
    too, so factors saved alone would no longer fit the model they were made for.
    """
    directory.mkdir(parents=True, exist_ok=True)
    merge: Any = getattr(model, "merge_and_unload", None)
    if merge is not None:
        model = merge()
    save_pretrained: Any = getattr(model, "save_pretrained", None)
    if save_pretrained is not None:
        with no_progress_bars():
            save_pretrained(directory)
    else:
        save_model(model, str(directory / "model.safetensors"))
    if task.save_assets is not None:
        task.save_assets(directory)


def describe_subject(config: RunConfig, model: Path, chosen: str | None) -> dict[str, str]:
    """Whose card it is; `model` is the folder of the weights, `chosen` what the method chose."""
    subject = subject_of(config.model.given_name, config.data.given_name, model)
    return subject if chosen is None else {**subject, "chosen by method": chosen}


def count_parameters(model: nn.Module) -> dict[str, int]:
    """How large the model is; to be asked before low-rank factors are merged."""
    sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]
    return {
        "total_parameters": sum(size for size, _ in sizes),
        "trainable_parameters": sum(size for size, trainable in sizes if trainable),
    }


def scores_by_split(
    task: Task, model: nn.Module, records: list[StepRecord]
) -> dict[str, dict[str, Any]]:
    """What a finished run scored on each held-out split; the first was scored during training."""
    found: dict[str, dict[str, Any]] = {}
    last = records[-1] if records else None
    for split, evaluate in task.evaluations.items():
        if not found and last is not None and last.heldout_score is not None:
            found[split] = {"score": last.heldout_score, "loss": last.heldout_loss}
            continue
        result = evaluate(model)
        values = {"score": result.score, "loss": result.loss}
        found[split] = {k: v if math.isfinite(v) else None for k, v in values.items()}
    return found


def summarise(
    task: Task,
    config: RunConfig,
    outcome: Outcome,
    records: list[StepRecord],
    card: PrivacyCard,
) -> dict[str, Any]:
    """Result, claims and environment; every ε sits beside its kind inside the card."""
    scored = [record for record in records if record.heldout_score is not None]
    last = scored[-1] if scored else None
    model = task.model
    device = str(next(model.parameters()).device)
    return {
        "task": task.name,
        "finished": outcome.finished,
        "interrupted_by": outcome.interrupted_by,
        "steps_taken": outcome.steps_taken,
        "steps_lost": outcome.steps_lost,
        "score_name": task.score_name,
        "heldout_score": last and last.heldout_score,
        "heldout_loss": last and last.heldout_loss,
        "seconds_in_steps": sum(record.seconds for record in records),
        "samples_per_second": samples_per_second(records),
        "seconds_by_part": {name: round(value, 6) for name, value in outcome.seconds.items()},
        "dataset_size": len(task.train_data),
        "privacy_card": card.to_json(),
        "routes": backends.report(),
        "config": config.without_seed(),
        "environment": {
            **environment(device),
            "shuffled_dpsgd": __version__,
            "device": device,
        },
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
