"""Tasks as audits take them: how to start a fresh run on data of a given size, and its records."""

from __future__ import annotations

import copy
from dataclasses import replace

from shuffled_dpsgd.auditing.fitted_start import fit_to_records
from shuffled_dpsgd.auditing.run import AuditTarget
from shuffled_dpsgd.tasks.config import RunConfig
from shuffled_dpsgd.tasks.start import chosen_device, start_private
from shuffled_dpsgd.tasks.task import Task, build_task
from shuffled_dpsgd.training.private import PrivateTraining


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
    """A task that is built already, as audits take it.

    An audit counts itself in the run's budget; the runs that it starts have none of their own.
    """
    uncounted = replace(config, privacy=replace(config.privacy, budget=None))

    def start(dataset_size: int) -> PrivateTraining:
        return start_private(uncounted, copy.deepcopy(task.model), dataset_size=dataset_size)

    return AuditTarget(
        start=start,
        data=task.train_data,
        losses=task.losses,
        collate=task.collate,
        budget=config.privacy.budget,
    )
