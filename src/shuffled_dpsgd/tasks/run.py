"""One training run, from a configuration to a folder with its results.

The folder holds `run.json` (the configuration), `ledger.jsonl` and `checkpoints/` while training,
and at the end `model/` (weights), `metrics.jsonl`, `summary.json`, the privacy card, `report.html`
and `figures/`. Only weights and card may be published: the others have numbers without noise.
An interrupted run resumes from its folder alone.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shuffled_dpsgd.distributed import current_world
from shuffled_dpsgd.distributed.agreement import first_does
from shuffled_dpsgd.models import weights_of
from shuffled_dpsgd.reports import MetricsLog
from shuffled_dpsgd.tasks.averaging import WeightAverage
from shuffled_dpsgd.tasks.config import RunConfig
from shuffled_dpsgd.tasks.diagnosis import Finding, diagnose
from shuffled_dpsgd.tasks.results import (
    Observer,
    Recorder,
    count_parameters,
    save_weights,
    scores_by_split,
    write_results,
)
from shuffled_dpsgd.tasks.run_folder import (
    LEDGER_FILE,
    check_data,
    check_space,
    claim_directory,
    empty_directory,
    given_back_on_error,
    write_start,
)
from shuffled_dpsgd.tasks.sharding import compare_data, fill_whole, has_room, shard_model
from shuffled_dpsgd.tasks.start import (
    build_scheduler,
    chosen_device,
    compare_configs,
    start_private,
)
from shuffled_dpsgd.tasks.task import Task, build_task
from shuffled_dpsgd.training.global_randomness import seed_dropout
from shuffled_dpsgd.training.loop import Callback, LoopSettings, Outcome, Progress, train
from shuffled_dpsgd.training.private import PrivateTraining


@dataclass(frozen=True, kw_only=True)
class PreparedRun:
    """A run whose model is built and whose noise is calibrated, before its first step.

    `made` is the first folder that was made for it; None for a run that is resumed. `whole`, on
    rank 0 of a sharded run, is the model that the trained weights are gathered into at the end.
    """

    config: RunConfig
    directory: Path
    task: Task
    private: PrivateTraining
    scheduler: torch.optim.lr_scheduler.LRScheduler
    average: WeightAverage | None
    made: Path | None
    checkpoint: str | None
    whole: nn.Module | None

    @property
    def resumed(self) -> bool:
        """Whether the run was begun before."""
        return self.made is None

    def scoring(self) -> AbstractContextManager[None]:
        """Inside, the model has the average of its weights, if the run keeps one."""
        return nullcontext() if self.average is None else self.average.standing_in(self.task.model)


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """How a run ended and what it wrote."""

    outcome: Outcome
    summary: dict[str, Any]
    directory: Path
    findings: tuple[Finding, ...] = ()


def prepare(
    config: RunConfig, directory: Path, *, resume: bool = False, checkpoint: str | None = None
) -> PreparedRun:
    """Load data and model and calibrate; a fresh run needs an empty folder.

    `checkpoint` names the one to resume from, instead of the newest. What fails here leaves the
    folder as it was.
    """
    training, world = config.training, current_world()
    device = chosen_device(training.device)
    compare_configs(world, config)
    made = None if resume else first_does(world, lambda: claim_directory(directory))
    with given_back_on_error(directory, made=made if world.leads else None):
        if training.num_threads is not None:
            torch.set_num_threads(training.num_threads)
        task = build_task(config)
        if resume:
            first_does(world, lambda: check_data(directory, task.train_data))
        else:
            first_does(world, lambda: check_space(directory, task.model))
        compare_data(world, task.train_data)
        whole = None
        if training.sharding != "replicated":
            whole = copy.deepcopy(task.model) if world.leads else None
            shard_model(task.model, world, device, a_copy_per_node=training.sharding == "hybrid")
        model = task.model.to(device)
        if config.seed is not None:
            seed_dropout(config.seed)
        decay = training.weight_averaging
        average = WeightAverage(model, decay=decay) if decay else None
        private = start_private(
            config,
            model,
            dataset_size=task.dataset_size,
            units=task.units,
            ledger_path=directory / LEDGER_FILE,
        )
        if not resume:
            first_does(world, lambda: write_start(directory, config, task.train_data))
    return PreparedRun(
        config=config,
        directory=directory,
        task=task,
        private=private,
        scheduler=build_scheduler(private.optimizer, config.optimizer, private.plan.num_steps),
        average=average,
        made=made,
        checkpoint=checkpoint,
        whole=whole,
    )


def execute(run: PreparedRun, observers: tuple[Observer, ...] = ()) -> RunResult:
    """Train to the end of the plan or to a signal, then write all results.

    Of several ranks, rank 0 evaluates and writes; the others' result has no summary.
    """
    private, leads = run.private, run.private.world.leads
    log = MetricsLog(run.directory / "metrics.jsonl")
    every, steps = run.config.training.evaluate_every, private.plan.num_steps
    recorder = Recorder(log, run.task, every, steps, private.clock, observers)
    try:
        outcome = train(
            private,
            run.task.train_data,
            run.task.losses,
            settings=_settings(run),
            callbacks=_callbacks(run, recorder),
            scheduler=run.scheduler,
            resume=run.resumed,
        )
    except BaseException:
        if leads and run.made is not None and private.ledger.spent == 0:
            empty_directory(run.directory, made=run.made)
        raise
    more: dict[str, Any] = {**count_parameters(private.model), "heldout_scores": {}}
    if outcome.finished:
        # Saved before anything else can fail, because its budget is spent.
        _save(run)
        with _scored(run) as model:
            if leads:
                recorder.score_last(model)
                more["heldout_scores"] = scores_by_split(run.task, model, log.read())
                if run.task.evaluate_texts is not None:
                    more["generation"] = run.task.evaluate_texts(model)
    if not leads:
        return RunResult(outcome=outcome, summary={}, directory=run.directory)
    records = log.read()
    findings = tuple(diagnose(records, private.plan))
    summary = write_results(
        run.directory, run.config, run.task, private, outcome, records, findings, more
    )
    return RunResult(outcome=outcome, summary=summary, directory=run.directory, findings=findings)


def _settings(run: PreparedRun) -> LoopSettings:
    training, private = run.config.training, run.private
    # Running out of memory is an error on a GPU; a CPU swaps.
    searches = training.physical_batch_size is None and private.device.type == "cuda"
    return LoopSettings(
        checkpoint_dir=run.directory / "checkpoints",
        checkpoint=run.checkpoint,
        checkpoint_every=training.checkpoint_every,
        precision=training.precision,
        physical_batch="find" if searches and not private.is_sharded else "as-planned",
        collate=run.task.collate,
        price_steps=private.world.leads,
        augment=run.task.augment,
        extras={} if run.average is None else {"average": run.average},
    )


def _callbacks(run: PreparedRun, recorder: Recorder) -> list[Callback]:
    """Callbacks after every update: first the average, which is evaluated, then the recorder.

    Rank 0 records. For an evaluation all ranks of a sharded run send it their weights.
    """
    average, private = run.average, run.private

    def record(progress: Progress) -> None:
        with ExitStack() as stack:
            if recorder.evaluates(progress.metrics.step + 1):
                stack.enter_context(run.scoring())
                stack.enter_context(private.unsharded_layers())
            if private.world.leads:
                recorder(progress, private.model)

    follow = [] if average is None else [lambda progress: average.update(private.model)]
    return [*follow, record]


def _save(run: PreparedRun) -> None:
    """Write the trained weights, or their average, which stays in the model. Collective."""
    private, model = run.private, run.task.model
    private.claims.check_released()
    if run.average is not None:
        run.average.change_places(model)
        private.claims.note_released()
    if private.is_sharded:
        fill_whole(private.world, run.whole, model)
    if private.world.leads:
        adapter = _fits_public_model(run)
        save_weights(run.task, run.whole or model, run.directory / "model", adapter=adapter)
        private.claims.note_released()  # Low-rank factors may have been merged.


def _fits_public_model(run: PreparedRun) -> bool:
    """Whether low-rank factors can be saved alone: others have the frozen weights as they are.

    A shuffle may have moved them, and weights that were drawn from a seed are nowhere to load.
    """
    model, spec = run.config.model, run.private.spec
    moved = frozenset[str]()
    if spec is not None and run.private.plan.permutes:
        moved = spec.moved_names
    frozen = {name for name, p in run.task.model.named_parameters() if not p.requires_grad}
    is_public = weights_of(model.name) is not None and not model.from_scratch
    return model.lora_rank is not None and is_public and not moved & frozen


@contextmanager
def _scored(run: PreparedRun) -> Iterator[nn.Module]:
    """The model for rank 0 to score: the whole copy, if its device has room for it."""
    private, room = run.private, True
    if private.is_sharded:
        room = private.world.from_first(run.whole is None or has_room(run.whole, private.device))
    if room:
        yield run.task.model if run.whole is None else run.whole.to(private.device)
        return
    with private.unsharded_layers():
        yield run.task.model
