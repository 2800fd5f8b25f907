"""One cell: a configuration is trained and scored; everything found goes into one record.

Nothing but the record is kept: no checkpoints and no weights. Cells of one process share the data,
encoded, and whatever the process has compiled; what a cell finds does not depend on the cells that
were run before it.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from shuffled_dpsgd.accounting import PrivacyClaim
from shuffled_dpsgd.core.plan import PrivacyPlan
from shuffled_dpsgd.environment import environment
from shuffled_dpsgd.tasks import Evaluation, RunConfig, Task, build_task, start_private
from shuffled_dpsgd.tasks.averaging import WeightAverage
from shuffled_dpsgd.tasks.start import build_scheduler, chosen_device
from shuffled_dpsgd.training.loop import Callback, LoopSettings, Outcome, train
from shuffled_dpsgd.training.private import PrivateTraining
from shuffled_dpsgd.training.spending import paper_estimate
from shuffled_dpsgd_experiments.provenance import Provenance, data_digest
from shuffled_dpsgd_experiments.sweeps.grid import Cell
from shuffled_dpsgd_experiments.sweeps.search import run_search

_OF_BLOCKS = ("name", "dimension", "noise_multiplier", "batch_clip_norm")


class Tasks:
    """The tasks of the last few cells: those that share data read and encode them once.

    Sweeps go back and forth between a few: tuning holds records back, the grid does not. What could
    not be built is not tried again: it may have been a minute's attempt to reach the hub.
    """

    def __init__(self, kept: int = 4) -> None:
        self._kept = kept
        self._found: dict[str, tuple[int, Task]] = {}
        self._missing: dict[str, Exception] = {}
        self._digests: dict[str, str] = {}

    def of(self, config: RunConfig) -> Task:
        """The configured task with the initial weights of the configured seed."""
        key, seed = self.key_of(config), config.init_seed
        if key in self._missing:
            raise self._missing[key]
        known = self._found.pop(key, None)
        if known is None:
            task = self._built(key, config)
        elif known[0] == seed:
            task = known[1]
        else:
            task = replace(known[1], model=known[1].fresh_model(seed))
        self._found[key] = seed, task
        while len(self._found) > self._kept:
            self._found.pop(next(iter(self._found)))
        return task

    def _built(self, key: str, config: RunConfig) -> Task:
        try:
            return build_task(config)
        except Exception as error:
            self._missing[key] = error
            raise

    def digest_of(self, config: RunConfig) -> str:
        """Of the training records."""
        key = self.key_of(config)
        if key not in self._digests:
            self._digests[key] = data_digest(self.of(config).train_data)
        return self._digests[key]

    def are_missing(self, config: RunConfig) -> bool:
        """Whether the data or the model of a run could not be had."""
        return self.key_of(config) in self._missing

    @staticmethod
    def key_of(config: RunConfig) -> str:
        """What a task is built from, but for the seed."""
        raw = config.to_json()
        views = config.training.augmentation_multiplicity
        parts = [raw["task"], raw["model"], raw["data"], raw.get("generation"), views]
        return json.dumps(parts, sort_keys=True)


def run_cell(cell: Cell, tasks: Tasks) -> dict[str, Any] | None:
    """Train and score a cell; None if a signal stopped it."""
    if cell.config.training.num_threads is not None:
        torch.set_num_threads(cell.config.training.num_threads)
    # What a cell that raised had in memory is free only now, after its error.
    _free_memory()
    try:
        if cell.best_of is None:
            return _record(cell, tasks)
        return run_search(
            cell,
            tasks.of(cell.config),
            plan_of=lambda each: _plan_of(each, tasks),
            train=lambda each: _record(_alone(each), tasks),
        )
    finally:
        _free_memory()


def _plan_of(cell: Cell, tasks: Tasks) -> PrivacyPlan:
    private = _start(_alone(cell), tasks.of(cell.config))
    private.close()
    return private.plan


def _start(cell: Cell, task: Task) -> PrivateTraining:
    model = copy.deepcopy(task.model).to(chosen_device(cell.config.training.device))
    return start_private(cell.noisy_config, model, dataset_size=len(task.train_data))


def _alone(cell: Cell) -> Cell:
    """A run of a search: it is the search that counts in the budget, and no noise is repeated."""
    privacy = replace(cell.config.privacy, budget=None)
    return replace(cell, config=replace(cell.config, privacy=privacy), own_noise=True)


def _free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _record(cell: Cell, tasks: Tasks) -> dict[str, Any] | None:
    started, config = time.perf_counter(), cell.config
    # Dropout, where a model has any, must not depend on the cells before.
    torch.manual_seed(config.init_seed)
    task = tasks.of(config)
    private = _start(cell, task)
    model, decay = private.model, config.training.weight_averaging
    average = WeightAverage(model, decay=decay) if decay else None
    provenance = Provenance(model, tasks.digest_of(config))
    nonfinite: list[int] = []
    callbacks: list[Callback] = [
        lambda done: nonfinite.append(done.metrics.num_nonfinite),
        provenance,
    ]
    if average is not None:
        callbacks.append(lambda progress: average.update(model))
    outcome = train_on(config, task, private, callbacks)
    if not outcome.finished:
        return None
    trained = time.perf_counter()
    if average is not None:
        average.change_places(model)
    scores = evaluate(task, model, texts=cell.stage == "main")
    return {
        "sweep": cell.sweep,
        "stage": cell.stage,
        "method": cell.method,
        "epsilon": cell.epsilon,
        "seed": cell.seed,
        "tuned": dict(cell.tuned),
        "score_name": task.score_name,
        **scores,
        **describe_plan(private.plan),
        "steps_taken": outcome.steps_taken,
        "samples_without_finite_gradient": sum(nonfinite),
        "seconds": {
            "whole": time.perf_counter() - started,
            "evaluation": time.perf_counter() - trained,
        },
        "config": cell.described,
        **provenance.to_json(),
        "environment": environment(str(private.device)),
    }


def train_on(
    config: RunConfig, task: Task, private: PrivateTraining, callbacks: Sequence[Callback] = ()
) -> Outcome:
    """Train what was started on a task's records as a file asks; nothing is kept but the model."""
    find = config.training.physical_batch_size is None and private.device.type == "cuda"
    with contextlib.closing(private):
        return train(
            private,
            task.train_data,
            task.losses,
            settings=LoopSettings(
                precision=config.training.precision,
                physical_batch="find" if find else "as-planned",
                collate=task.collate,
                augment=task.augment,
                price_steps=False,
            ),
            callbacks=callbacks,
            scheduler=build_scheduler(private.optimizer, config.optimizer, private.plan.num_steps),
        )


def evaluate(task: Task, model: torch.nn.Module, *, texts: bool) -> dict[str, Any]:
    """Scores on held-out records, for every split where there are several.

    With `texts` also those of generated texts, if the task has any; tuning goes without, for it
    must not see the test set.
    """
    found: dict[str, Any] = {name: _scores(of(model)) for name, of in task.evaluations.items()}
    if found:
        scores = {**next(iter(found.values())), "splits": found}
    else:
        scores = _scores(task.evaluate(model))
    if texts and task.evaluate_texts is not None:
        scores["generation"] = task.evaluate_texts(model)
    return scores


def _scores(evaluation: Evaluation) -> dict[str, Any]:
    found = asdict(evaluation)
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in found.items()
    }


def describe_plan(plan: PrivacyPlan) -> dict[str, Any]:
    """The noise of a run and what may be claimed of it; every ε beside its kind."""
    return {
        "num_steps": plan.num_steps,
        "dataset_size": plan.dataset_size,
        "falls_back": plan.falls_back,
        "blocks": [{name: getattr(block, name) for name in _OF_BLOCKS} for block in plan.blocks],
        "certified": _claim(plan.certified()),
        "why_not_certified": list(plan.uncertifiable),
        "paper": _claim(paper_estimate(plan)),
    }


def _claim(claim: PrivacyClaim | None) -> dict[str, Any] | None:
    if claim is None:
        return None
    epsilon = claim.epsilon if math.isfinite(claim.epsilon) else None
    return {"epsilon": epsilon, "delta": claim.delta, "kind": claim.kind, "method": claim.method}
