"""Tasks as audits take them: how to start a fresh run on data of a given size, and its records."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import default_collate

from shuffled_dpsgd.auditing.run import AuditTarget
from shuffled_dpsgd.tasks.config import RunConfig
from shuffled_dpsgd.tasks.privacy import chosen_device, start_private
from shuffled_dpsgd.tasks.registry import build_task
from shuffled_dpsgd.tasks.task import Task
from shuffled_dpsgd.training.data import shaped, to_device
from shuffled_dpsgd.training.private import PrivateTraining

WITHOUT_PRIVACY: dict[str, Any] = {
    "epsilon": None,
    "noise_multiplier": 0.0,
    "unshuffled_noise_multiplier": None,
    "batch_clip_norm": None,
    "clip_norm": math.inf,
    "accounting": "certified",
    "shuffle": "off",
    "noise_frame": "shuffled",
}
FIT_RATE, FIT_BATCH = 1e-3, 64


def prepared_task(config: RunConfig, *, fit_steps: int = 0) -> Task:
    """The configured task, its initial weights fitted to its records for so many steps first."""
    task = build_task(config)
    if fit_steps:
        task.model.to(chosen_device(config.training.device))
        fit_to_records(task, num_steps=fit_steps, seed=config.init_seed)
    return task


def fit_to_records(task: Task, *, num_steps: int, seed: int) -> None:
    """Fit the trainable weights in place by AdamW, without privacy: the worst case of an audit.

    A guarantee holds whatever the initial weights are, so an auditor may choose them. Weights that
    fit the records already have small gradients, among which a canary stands out (Annamalai & De
    Cristofaro, 2024). They are part of the audit alone and are never released.
    """
    model, data, mode = task.model, task.train_data, task.model.training
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=FIT_RATE)
    model.train()
    for _ in range(num_steps):
        chosen = torch.randint(len(data), (min(FIT_BATCH, len(data)),), generator=generator)
        batch = (task.collate or default_collate)([data[int(i)] for i in chosen])
        optimizer.zero_grad(set_to_none=True)
        task.losses(model, to_device(shaped(batch), device)).mean().backward()
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    model.train(mode)


def audit_target(config: RunConfig, *, fit_steps: int = 0) -> AuditTarget:
    """Fresh runs of the configured task, each from a copy of the same initial weights.

    With `fit_steps`, these are first fitted to the records for so many steps: the worst case.
    """
    return target_of(config, prepared_task(config, fit_steps=fit_steps))


def target_of(config: RunConfig, task: Task) -> AuditTarget:
    """A task that is built already, as audits take it."""
    plain = replace(config, privacy=replace(config.privacy, **WITHOUT_PRIVACY))

    def start(dataset_size: int) -> PrivateTraining:
        return start_private(config, copy.deepcopy(task.model), dataset_size=dataset_size)

    def start_plain(dataset_size: int) -> PrivateTraining:
        return start_private(plain, copy.deepcopy(task.model), dataset_size=dataset_size)

    return AuditTarget(
        start=start,
        start_plain=start_plain,
        data=task.train_data,
        losses=task.losses,
        collate=task.collate,
    )
