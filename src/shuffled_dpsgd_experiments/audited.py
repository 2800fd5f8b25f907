"""Tasks as audits take them: how to start a fresh run on data of a given size, and its records."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils.data import Subset

from shuffled_dpsgd.auditing.black_box import Start
from shuffled_dpsgd.auditing.fitted_start import fit_to_records
from shuffled_dpsgd.auditing.run import AuditTarget
from shuffled_dpsgd.options import NoiseFrame, Shuffle
from shuffled_dpsgd.tasks import digits
from shuffled_dpsgd.tasks.config import RunConfig
from shuffled_dpsgd.tasks.privacy import chosen_device, start_private
from shuffled_dpsgd.tasks.registry import build_task
from shuffled_dpsgd.tasks.task import Task
from shuffled_dpsgd.training import make_private
from shuffled_dpsgd.training.private import PrivateTraining

HIDDEN = 64


def prepared_task(config: RunConfig, *, fit_steps: int = 0) -> Task:
    """The configured task, its initial weights fitted to its records for so many steps first."""
    task = build_task(config)
    if fit_steps:
        task.model.to(chosen_device(config.training.device))
        fit_to_records(
            task.model,
            task.train_data,
            task.losses,
            num_steps=fit_steps,
            collate=task.collate,
            seed=config.init_seed,
        )
    return task


def audit_target(config: RunConfig, *, fit_steps: int = 0) -> AuditTarget:
    """Fresh runs of the configured task, each from a copy of the same initial weights.

    With `fit_steps`, these are first fitted to the records for so many steps: the worst case.
    """
    return target_of(config, prepared_task(config, fit_steps=fit_steps))


def target_of(config: RunConfig, task: Task) -> AuditTarget:
    """A task that is built already, as audits take it."""

    def start(dataset_size: int) -> PrivateTraining:
        return start_private(config, copy.deepcopy(task.model), dataset_size=dataset_size)

    return AuditTarget(start=start, data=task.train_data, losses=task.losses, collate=task.collate)


def starts_of(config: RunConfig, initial: nn.Module) -> Start:
    """Fresh runs from the same initial weights, by data set size, seed, shuffle and noise frame."""

    def start(
        dataset_size: int, seed: int, shuffle: Shuffle, noise_frame: NoiseFrame
    ) -> PrivateTraining:
        privacy = replace(config.privacy, shuffle=shuffle, noise_frame=noise_frame)
        chosen = replace(config, seed=seed, privacy=privacy)
        return start_private(chosen, copy.deepcopy(initial), dataset_size=dataset_size)

    return start


def cross_entropies(model: nn.Module, batch: Any) -> torch.Tensor:
    """One loss per image, for models that return logits, plain or in a record."""
    found = model(batch[0])
    logits = found if isinstance(found, torch.Tensor) else found.logits
    return nn.functional.cross_entropy(logits, batch[1], reduction="none")


def small_network(seed: int) -> nn.Module:
    """64 pixels, one hidden layer of `HIDDEN` units, ten classes: the paper's Theorem 1, alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 10))


def long_run_target(
    *, epsilon: float, num_steps: int, batch_clip: float, seed: int, expected_batch_size: int = 16
) -> AuditTarget:
    """A network small enough for ten thousand steps, on digits, at the paper's own calibration."""
    train, _ = digits.load_digits()

    def start(dataset_size: int) -> PrivateTraining:
        model = small_network(seed)
        return make_private(
            model,
            torch.optim.SGD(model.parameters(), lr=0.05),
            dataset_size=dataset_size,
            expected_batch_size=expected_batch_size,
            num_steps=num_steps,
            epsilon=epsilon,
            delta=1e-4,
            clip_norm=1.0,
            batch_clip_norm=batch_clip,
            accounting="paper",
            shuffle="every-step",
            seed=seed,
        )

    return AuditTarget(start=start, data=train, losses=cross_entropies)


def small_vit_runs(*, noise_multiplier: float, num_steps: int, expected_batch_size: int) -> Start:
    """Runs of the digits ViT by (data set size, seed, shuffle, noise frame), AdamW."""

    def start(
        dataset_size: int, seed: int, shuffle: Shuffle, noise_frame: NoiseFrame
    ) -> PrivateTraining:
        model = digits.build_model()
        return make_private(
            model,
            torch.optim.AdamW(model.parameters(), lr=1e-2),
            dataset_size=dataset_size,
            expected_batch_size=expected_batch_size,
            num_steps=num_steps,
            noise_multiplier=noise_multiplier,
            delta=1e-4,
            clip_norm=1.0,
            shuffle=shuffle,
            noise_frame=noise_frame,
            seed=seed,
        )

    return start


def digits_records(count: int) -> Subset[Any]:
    """The first `count` training digits."""
    train, _ = digits.load_digits()
    return Subset(train, range(count))
