"""What the knock-out attacks: runs by seed and shuffle, of a task or of a small ViT on digits."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils.data import Subset

from shuffled_dpsgd.auditing.target import AuditTarget, refuse_budget
from shuffled_dpsgd.tasks import build_task, digits
from shuffled_dpsgd.tasks.audited import target_of
from shuffled_dpsgd.tasks.config import RunConfig
from shuffled_dpsgd.tasks.start import start_private
from shuffled_dpsgd.training import make_private
from shuffled_dpsgd.training.private import PrivateTraining
from shuffled_dpsgd_experiments.audits.black_box import Start


def starts_of(config: RunConfig, initial: nn.Module) -> Start:
    """Fresh runs from the same initial weights, by data set size, seed and changed options."""

    def start(dataset_size: int, seed: int, changes: Mapping[str, Any]) -> PrivateTraining:
        chosen = replace(config, seed=seed, privacy=replace(config.privacy, **changes))
        return start_private(chosen, copy.deepcopy(initial), dataset_size=dataset_size)

    return start


def cross_entropies(model: nn.Module, batch: Any) -> torch.Tensor:
    """One loss per image, for models that return logits, plain or in a record."""
    found = model(batch[0])
    logits = found if isinstance(found, torch.Tensor) else found.logits
    return nn.functional.cross_entropy(logits, batch[1], reduction="none")


def black_box_target(
    config: RunConfig | None, *, noise_multiplier: float | None, num_steps: int | None
) -> tuple[Start, AuditTarget]:
    """Runs of a file's task; without a file, of the digits ViT on the first 200 digits."""
    if config is None:
        return _small_vits(0.1 if noise_multiplier is None else noise_multiplier, num_steps or 60)
    refuse_budget(config.privacy.budget, "losses of records, which the black box shows,")
    task = build_task(config)
    return starts_of(config, task.model), target_of(config, task)


def _small_vits(noise_multiplier: float, num_steps: int) -> tuple[Start, AuditTarget]:
    def start(dataset_size: int, seed: int, changes: Mapping[str, Any]) -> PrivateTraining:
        model = digits.build_model()
        return make_private(
            model,
            torch.optim.AdamW(model.parameters(), lr=1e-2),
            dataset_size=dataset_size,
            expected_batch_size=100,
            num_steps=num_steps,
            delta=1e-4,
            seed=seed,
            **{"noise_multiplier": noise_multiplier, "clip_norm": 1.0, **changes},
        )

    records = Subset(digits.load_digits()[0], range(200))
    return start, AuditTarget(
        start=lambda size: start(size, 0, {}), data=records, losses=cross_entropies
    )
