"""Turns the loop's progress into records: evaluates now and then, writes each step down."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn

from shuffled_dpsgd.accounting import PrivacyClaim
from shuffled_dpsgd.reports import MetricsLog, StepRecord, count_norms
from shuffled_dpsgd.runtime.clock import Clock
from shuffled_dpsgd.tasks.task import Evaluation, Task
from shuffled_dpsgd.training.loop import Progress


class Recorder:
    """A callback for the training loop; calls its observers with each finished record."""

    def __init__(
        self,
        *,
        log: MetricsLog,
        task: Task,
        model: nn.Module,
        evaluate_every: int,
        num_steps: int,
        clock: Clock | None = None,
        observers: tuple[Callable[[StepRecord, Progress], object], ...] = (),
    ) -> None:
        self._log = log
        self._task = task
        self._model = model
        self._evaluate_every = evaluate_every
        self._num_steps = num_steps
        self._clock = clock or Clock()
        self._observers = observers
        self._rewound = False

    def __call__(self, progress: Progress) -> None:
        """Record one update; the first call drops records of steps that are repeated now."""
        record = self._record(progress)
        if not self._rewound:
            self._log.rewind(record.step - 1)
            self._rewound = True
        self._log.append(record)
        for observer in self._observers:
            observer(record, progress)

    def evaluates(self, step: int) -> bool:
        """Whether the record of a step, counted from 1, comes with an evaluation."""
        return step % self._evaluate_every == 0 or step == self._num_steps

    def score_last(self, model: nn.Module) -> None:
        """Evaluate the weights a run ended with, if its last step was not evaluated.

        That is so when a crash lost steps whose releases stay spent.
        """
        records = self._log.read()
        if not records or records[-1].heldout_score is not None:
            return
        last = records[-1]
        evaluation = self._task.evaluate(model)
        self._log.rewind(last.step - 1)
        self._log.append(replace(last, **_scores(evaluation)))

    def _record(self, progress: Progress) -> StepRecord:
        metrics = progress.metrics
        step = metrics.step + 1
        evaluation = None
        if self.evaluates(step):
            with self._clock.part("evaluation"):
                evaluation = self._task.evaluate(self._model)
        return StepRecord(
            step=step,
            batch_size=metrics.batch_size,
            seconds=progress.seconds,
            learning_rate=progress.learning_rate,
            loss=_finite(metrics.loss),
            clipped_share=metrics.clipped_share,
            median_norm=_finite(metrics.median_norm),
            signal_to_noise=_finite(metrics.signal_to_noise),
            certified_epsilon=_epsilon(progress.certified),
            paper_epsilon=_epsilon(progress.paper),
            **({} if evaluation is None else _scores(evaluation)),
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


def _epsilon(claim: PrivacyClaim | None) -> float | None:
    return None if claim is None else _finite(claim.epsilon)


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
