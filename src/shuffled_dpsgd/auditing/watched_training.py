"""A private run trained to the end of its plan while an audit looks at every update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shuffled_dpsgd.auditing.probes import OnProgress
from shuffled_dpsgd.training.data import MapStyle
from shuffled_dpsgd.training.physical import PerSampleLoss
from shuffled_dpsgd.training.private import PrivateTraining


def train_watched(
    private: PrivateTraining,
    data: MapStyle,
    losses: PerSampleLoss,
    collate: Callable[[list[Any]], Any] | None,
    watch: Callable[[], None],
    on_progress: OnProgress | None,
) -> None:
    """Train all steps of the plan, and call `watch` after each update."""

    def observe() -> None:
        watch()
        if on_progress is not None:
            on_progress(private.steps_taken, private.plan.num_steps)

    stop = private.on_update(observe)
    for batch in private.batches(data, collate=collate):
        private.backward(losses(private.model, batch))
        private.step()
    stop()
