"""What a run writes: a record of each step, weights, `summary.json` and the report."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from torch import nn

from shuffled_dpsgd import __version__
from shuffled_dpsgd.environment import environment, subject_of
from shuffled_dpsgd.reports import (
    MetricsLog,
    RunView,
    StepRecord,
    count_norms,
    samples_per_second,
    write_report,
)
from shuffled_dpsgd.runtime import backends
from shuffled_dpsgd.runtime.clock import Clock
from shuffled_dpsgd.tasks.config import RunConfig
from shuffled_dpsgd.tasks.diagnosis import Finding
from shuffled_dpsgd.tasks.models import describe_choices, no_progress_bars
from shuffled_dpsgd.tasks.run_folder import SUMMARY_FILE
from shuffled_dpsgd.tasks.task import Evaluation, Task
from shuffled_dpsgd.training.loop import Outcome, Progress
from shuffled_dpsgd.training.private import PrivateTraining
from shuffled_dpsgd.training.rows import shared_rows

Observer = Callable[[StepRecord, Progress], object]


@dataclass
class Recorder:
    """Turns the loop's progress into records, one per step, and evaluates at intervals."""

    log: MetricsLog
    task: Task
    evaluate_every: int
    num_steps: int
    clock: Clock
    observers: tuple[Observer, ...]
    rewound: bool = False

    def __call__(self, progress: Progress, model: nn.Module) -> None:
        """Record one update; the first call drops old records of steps that are repeated."""
        record = self._record(progress, model)
        if not self.rewound:
            self.log.rewind(record.step - 1)
            self.rewound = True
        self.log.append(record)
        for observer in self.observers:
            observer(record, progress)

    def evaluates(self, step: int) -> bool:
        """Whether the record of a step, counted from 1, comes with an evaluation."""
        return step % self.evaluate_every == 0 or step == self.num_steps

    def score_last(self, model: nn.Module) -> None:
        """Evaluate the final weights if the last step was not evaluated.

        That happens when a crash lost steps whose releases stay spent.
        """
        records = self.log.read()
        if records and records[-1].heldout_score is None:
            last = replace(records[-1], **_scores(self.task.evaluate(model)))
            self.log.rewind(last.step - 1)
            self.log.append(last)

    def _record(self, progress: Progress, model: nn.Module) -> StepRecord:
        metrics, scores = progress.metrics, {}
        step = metrics.step + 1
        if self.evaluates(step):
            with self.clock.part("evaluation"):
                scores = _scores(self.task.evaluate(model))
        certified, paper = progress.certified, progress.paper
        return StepRecord(
            step=step,
            batch_size=metrics.batch_size,
            seconds=progress.seconds,
            learning_rate=progress.learning_rate,
            loss=_finite(metrics.loss),
            clipped_share=metrics.clipped_share,
            median_norm=_finite(metrics.median_norm),
            signal_to_noise=_finite(metrics.signal_to_noise),
            certified_epsilon=None if certified is None else _finite(certified.epsilon),
            paper_epsilon=None if paper is None else _finite(paper.epsilon),
            **scores,
            num_nonfinite=metrics.num_nonfinite or None,
            norm_counts=count_norms(progress.sample_norms.tolist()),
        )


def _scores(evaluation: Evaluation) -> dict[str, Any]:
    return {
        "heldout_loss": _finite(evaluation.loss),
        "heldout_score": _finite(evaluation.score),
        "heldout_baseline": evaluation.baseline,
        "predicted_classes": evaluation.predicted_classes,
    }


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def save_weights(task: Task, model: nn.Module, directory: Path, *, adapter: bool) -> None:
    """Weights and what belongs to them, so that `from_pretrained` reads the folder.

    With `adapter`, low-rank factors are saved alone, as peft loads them, with the model's
    configuration. Otherwise they are merged into the weights, in place.
    """
    directory.mkdir(parents=True, exist_ok=True)
    found: Any = model
    if adapter:
        found.config.save_pretrained(directory)
    elif hasattr(found, "merge_and_unload"):
        found = found.merge_and_unload()
    with no_progress_bars():
        found.save_pretrained(directory)
    if task.save_assets is not None:
        task.save_assets(directory)


def count_parameters(model: nn.Module) -> dict[str, int]:
    """The size of the model; to be called before low-rank factors are merged."""
    sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]
    return {
        "total_parameters": sum(size for size, _ in sizes),
        "trainable_parameters": sum(size for size, trainable in sizes if trainable),
    }


def scores_by_split(
    task: Task, model: nn.Module, records: list[StepRecord]
) -> dict[str, dict[str, float | None]]:
    """The scores of a finished run on each held-out split; the first was scored in training."""
    found: dict[str, dict[str, float | None]] = {}
    last = records[-1] if records else None
    for split, evaluate in task.evaluations.items():
        if not found and last is not None and last.heldout_score is not None:
            found[split] = {"score": last.heldout_score, "loss": last.heldout_loss}
        else:
            result = evaluate(model)
            found[split] = {"score": _finite(result.score), "loss": _finite(result.loss)}
    return found


def write_results(
    directory: Path,
    config: RunConfig,
    task: Task,
    private: PrivateTraining,
    outcome: Outcome,
    records: list[StepRecord],
    findings: tuple[Finding, ...],
    more: dict[str, Any],
) -> dict[str, Any]:
    """Write the report and `summary.json`, with `more` in it; returns the summary."""
    plan, device = private.plan, str(private.device)
    chosen = describe_choices(config, private.model)
    subject = subject_of(config.model.given_name, config.data.given_name, directory / "model")
    card = private.card().about(**subject, **({"chosen by method": chosen} if chosen else {}))
    machine = environment(device)
    view = RunView(
        title=f"{subject['model']} on {subject['data']}, {subject['date']}",
        subtitle=f"Private training with shuffled DP-SGD: {task.name}",
        warnings=[finding.describe() for finding in findings],
        shared_rows=shared_rows(task.train_data, task.heldout_data),
        environment={key: machine[key] for key in ("hardware", "cpu_cores", "python", "torch")},
        records=records,
        clip_norm=plan.clip_norm,
        epsilon_budget=plan.epsilon,
        budget_kind="heuristic" if plan.accounting == "paper" else "proven",
        score_name=task.score_name,
        seconds_by_part=outcome.seconds,
    )
    write_report(directory, view, card, facts=config.without_seed())
    last = next((record for record in reversed(records) if record.heldout_score is not None), None)
    summary = {
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
        "environment": {**machine, "shuffled_dpsgd": __version__, "device": device},
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        **more,
        "warnings": [asdict(finding) for finding in findings],
        "chosen_by_method": chosen,
    }
    text = json.dumps(summary, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    (directory / SUMMARY_FILE).write_text(text, encoding="utf-8")
    return summary
