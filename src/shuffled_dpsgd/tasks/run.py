"""One training run, from a configuration to a folder with everything it leaves behind.

The folder holds `run.json` (the configuration), `ledger.jsonl` and `checkpoints/` while training,
and at the end `model/` (weights), `metrics.jsonl`, `summary.json`, the privacy card, `report.html`
and `figures/`. Weights and card may be published; the others have numbers without noise, or more.
Interrupted runs resume from the folder alone.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from shuffled_dpsgd.distributed import current_world
from shuffled_dpsgd.distributed.agreement import first_does
from shuffled_dpsgd.environment import environment
from shuffled_dpsgd.errors import CheckpointError
from shuffled_dpsgd.reports import MetricsLog, RunView, StepRecord, write_report
from shuffled_dpsgd.tasks import RunConfig, parse_config
from shuffled_dpsgd.tasks.averaging import ShardedAverage, WeightAverage
from shuffled_dpsgd.tasks.data_identity import check_data, compare_all_data, remember_data
from shuffled_dpsgd.tasks.diagnosis import Finding, diagnose
from shuffled_dpsgd.tasks.models import describe_choices
from shuffled_dpsgd.tasks.recorder import Recorder
from shuffled_dpsgd.tasks.run_folder import (
    UNFINISHED,
    check_space,
    claim_directory,
    empty_directory,
    given_back_on_error,
)
from shuffled_dpsgd.tasks.sharding import fill_whole, has_room, shard_model
from shuffled_dpsgd.tasks.start import (
    build_scheduler,
    chosen_device,
    compare_configs,
    start_private,
)
from shuffled_dpsgd.tasks.summary import (
    count_parameters,
    describe_subject,
    save_weights,
    scores_by_split,
    summarise,
)
from shuffled_dpsgd.tasks.task import Task, build_task
from shuffled_dpsgd.training.global_randomness import seed_dropout
from shuffled_dpsgd.training.loop import Callback, LoopSettings, Outcome, Progress, train
from shuffled_dpsgd.training.private import PrivateTraining
from shuffled_dpsgd.training.rows import shared_rows

CONFIG_FILE = "run.json"
SUMMARY_FILE = "summary.json"
_BY_METHOD = "chosen_by_method"
Observer = Callable[[StepRecord, Progress], object]


@dataclass(frozen=True, kw_only=True)
class PreparedRun:
    """A run whose model is built and whose noise is calibrated, before its first step."""

    config: RunConfig
    directory: Path
    task: Task
    private: PrivateTraining
    scheduler: torch.optim.lr_scheduler.LRScheduler
    average: WeightAverage | ShardedAverage | None = None
    made: Path | None = None
    checkpoint: str | None = None
    # Of a sharded run, on rank 0: a model that the trained weights are gathered into at the end.
    whole: torch.nn.Module | None = None

    @property
    def scored(self) -> torch.nn.Module:
        """What is evaluated and saved: the trained model, or the average of its weights.

        Of a sharded run, the average is in the trained model's place inside `scoring`.
        """
        if isinstance(self.average, WeightAverage):
            return self.average.model
        return self.private.model

    def scoring(self) -> AbstractContextManager[None]:
        """Around what is made of `scored`."""
        if isinstance(self.average, ShardedAverage):
            return self.average.standing_in(self.private.model)
        return nullcontext()

    @property
    def resumed(self) -> bool:
        """Whether the run was begun before, in this folder."""
        return self.made is None


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
    device = chosen_device(config.training.device)
    world = current_world()
    compare_configs(world, config)
    made = None if resume else first_does(world, lambda: claim_directory(directory))
    with given_back_on_error(directory, made=made if world.leads else None):
        if config.training.num_threads is not None:
            torch.set_num_threads(config.training.num_threads)
        task = build_task(config)
        if resume:
            first_does(world, lambda: check_data(directory, task.train_data))
        else:
            first_does(world, lambda: check_space(directory, task.model))
        compare_all_data(world, task.train_data)
        whole = None
        if config.training.sharding == "sharded":
            whole = copy.deepcopy(task.model) if world.leads else None
            shard_model(task.model, world, device)
        model = task.model.to(device)
        if config.seed is not None:
            seed_dropout(config.seed)
        decay = config.training.weight_averaging
        kind = ShardedAverage if config.training.sharding == "sharded" else WeightAverage
        average = kind(model, decay=decay) if decay else None
        private = start_private(
            config,
            model,
            dataset_size=len(task.train_data),
            ledger_path=directory / "ledger.jsonl",
        )
        if not resume:
            first_does(world, lambda: _write_down(config, directory, task))
    scheduler = build_scheduler(private.optimizer, config.optimizer, private.plan.num_steps)
    return PreparedRun(
        config=config,
        directory=directory,
        task=task,
        private=private,
        scheduler=scheduler,
        average=average,
        made=made,
        checkpoint=checkpoint,
        whole=whole,
    )


def _write_down(config: RunConfig, directory: Path, task: Task) -> None:
    remember_data(directory, task.train_data)
    stated = config.to_json() | {_BY_METHOD: list(config.by_method)}
    text = json.dumps(stated, indent=2) + "\n"
    # Whole or not at all: a folder with half of it could be neither begun nor resumed.
    unfinished = directory / UNFINISHED
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(directory / CONFIG_FILE)


def is_run_folder(directory: Path) -> bool:
    """Whether a run has begun there."""
    return (directory / CONFIG_FILE).is_file()


def load_run(directory: Path) -> RunConfig:
    """The configuration of the run in `directory`."""
    path = directory / CONFIG_FILE
    if not is_run_folder(directory):
        raise CheckpointError(
            f"{directory}: no {CONFIG_FILE}, so not the folder of a run; "
            "pass the folder an earlier run wrote to"
        )
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        # Runs that are older than the word have none.
        chosen = raw.pop(_BY_METHOD, ()) if isinstance(raw, dict) else ()
        return replace(parse_config(raw), by_method=tuple(chosen))
    except (ValueError, TypeError, OSError) as error:
        raise CheckpointError(f"{path}: not a run's configuration; {error}") from error


def finished_summary(directory: Path) -> dict[str, Any] | None:
    """The summary of a run that has nothing left to do; None for any other folder."""
    try:
        summary = json.loads((directory / SUMMARY_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    done = isinstance(summary, dict) and summary.get("finished") and (directory / "model").is_dir()
    return summary if done else None


def execute(run: PreparedRun, observers: tuple[Observer, ...] = ()) -> RunResult:
    """Train to the end of the plan or to a signal, then write everything down.

    Of several ranks, rank 0 evaluates and writes; the result of the others has no summary.
    """
    training, leads = run.config.training, run.private.world.leads
    log = MetricsLog(run.directory / "metrics.jsonl")
    recorder = Recorder(
        log=log,
        task=run.task,
        model=run.scored,
        evaluate_every=training.evaluate_every,
        num_steps=run.private.plan.num_steps,
        clock=run.private.clock,
        observers=observers,
    )
    settings = LoopSettings(
        checkpoint_dir=run.directory / "checkpoints",
        checkpoint=run.checkpoint,
        checkpoint_every=training.checkpoint_every,
        precision=training.precision,
        physical_batch="find" if _searches_batch(run) else "as-planned",
        collate=run.task.collate,
        price_steps=leads,
        augment=run.task.augment,
        extras={} if run.average is None else {"average": run.average},
    )
    try:
        outcome = train(
            run.private,
            run.task.train_data,
            run.task.losses,
            settings=settings,
            callbacks=_callbacks(run, recorder),
            scheduler=run.scheduler,
            resume=run.resumed,
        )
    except BaseException:
        if leads and run.made is not None and run.private.ledger.spent == 0:
            empty_directory(run.directory, made=run.made)
        raise
    sizes = count_parameters(run.private.model)
    scores: dict[str, Any] = {"heldout_scores": {}}
    if outcome.finished:
        # First of all: whatever happens to a report, the model was paid for.
        _save(run)
        with _whole_or_lent(run) as scored:
            scores = _scores(run, scored, recorder, log) if leads else scores
    if not leads:
        return RunResult(outcome=outcome, summary={}, directory=run.directory)
    records = log.read()
    findings = tuple(diagnose(records, run.private.plan))
    warnings = [finding.to_json() for finding in findings]
    more = sizes | {"warnings": warnings} | scores
    summary = _write_results(run, outcome, records, more)
    return RunResult(outcome=outcome, summary=summary, directory=run.directory, findings=findings)


def _save(run: PreparedRun) -> None:
    """Write the trained weights; collective where they are sharded."""
    run.private.check_released()
    if run.private.is_sharded:
        with run.scoring():
            fill_whole(run.private.world, run.whole, run.private.model)
    if run.private.world.leads:
        save_weights(run.task, run.whole or run.scored, run.directory / "model")


@contextmanager
def _whole_or_lent(run: PreparedRun) -> Iterator[torch.nn.Module]:
    """The model as rank 0 scores it: the whole copy, unless its device has no room for one."""
    private, room = run.private, True
    if private.is_sharded:
        room = private.world.from_first(run.whole is None or has_room(run.whole, private.device))
    if room:
        yield run.scored if run.whole is None else run.whole.to(private.device)
        return
    with run.scoring(), private.lent_weights():
        yield run.scored


def _scores(
    run: PreparedRun, scored: torch.nn.Module, recorder: Recorder, log: MetricsLog
) -> dict[str, Any]:
    """What the finished run scored on every split, and what its texts did."""
    recorder.score_last(scored)
    found: dict[str, Any] = {"heldout_scores": scores_by_split(run.task, scored, log.read())}
    if run.task.evaluate_texts is not None:
        found["generation"] = run.task.evaluate_texts(scored)
    return found


def _callbacks(run: PreparedRun, recorder: Recorder) -> list[Callback]:
    """What follows every update: the average first, for it is what is evaluated.

    Rank 0 records. All ranks of a sharded run lend it their weights where that means to evaluate.
    """
    found: list[Callback] = []
    average, private = run.average, run.private
    if average is not None:
        found.append(lambda progress: average.update(private.model))

    def record(progress: Progress) -> None:
        gathers = private.is_sharded and recorder.evaluates(progress.metrics.step + 1)
        with ExitStack() as stack:
            if gathers:
                stack.enter_context(run.scoring())
                stack.enter_context(private.lent_weights())
            if private.world.leads:
                recorder(progress)

    return [*found, record]


def _write_results(
    run: PreparedRun, outcome: Outcome, records: list[StepRecord], more: dict[str, Any]
) -> dict[str, Any]:
    plan, spec = run.private.plan, run.private.spec
    chosen = describe_choices(run.config, run.private.model)
    subject = describe_subject(run.config, run.directory / "model", chosen)
    card = run.private.card().about(**subject)
    machine = environment(str(run.private.device))
    moved = {} if spec is None else spec.count_by_kind()
    view = RunView(
        title=f"{subject['model']} on {subject['data']}, {subject['date']}",
        subtitle=f"Private training with shuffled DP-SGD: {run.task.name}",
        warnings=[f"{w['message']}; {w['advice']}" for w in more["warnings"]],
        shared_rows=shared_rows(run.task.train_data, run.task.heldout_data),
        environment={key: machine[key] for key in ("hardware", "cpu_cores", "python", "torch")},
        records=records,
        clip_norm=plan.clip_norm,
        epsilon_budget=plan.epsilon,
        budget_kind="heuristic" if plan.accounting == "paper" else "proven",
        score_name=run.task.score_name,
        moved_by_kind={kind: int(counts["moved_parameters"]) for kind, counts in moved.items()},
        unmoved_parameters=0 if spec is None else spec.total_parameters - spec.moved_parameters,
        seconds_by_part=outcome.seconds,
    )
    write_report(run.directory, view, card, spec=spec, facts=run.config.without_seed())
    summary = summarise(run.task, run.config, outcome, records, card) | more
    summary["chosen_by_method"] = chosen
    text = json.dumps(summary, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    (run.directory / SUMMARY_FILE).write_text(text, encoding="utf-8")
    return summary


def _searches_batch(run: PreparedRun) -> bool:
    """On a GPU, running out of memory is an error to learn from; on a CPU it swaps."""
    unsaid = run.config.training.physical_batch_size is None
    return unsaid and run.private.device.type == "cuda" and not run.private.is_sharded
