"""The budget in the Trainer's loop: what is logged of it, and that training ends with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback

from shuffled_dpsgd.training import PrivateTraining, SpendingCurve


class SpendingLogs:
    """What a step adds to the Trainer's logs; every epsilon says in its name what it is."""

    def __init__(self) -> None:
        self._spending: SpendingCurve | None = None

    def of_step(self, private: PrivateTraining) -> dict[str, float]:
        """Epsilon spent so far, and what became of the samples of the latest step."""
        if self._spending is None:
            self._spending = SpendingCurve(private.plan)
        metrics, spent = private.last_metrics, private.ledger.spent
        assert metrics is not None
        certified, paper = self._spending.certified(spent), self._spending.paper(spent)
        whole = self._spending.certified(private.plan.num_steps)
        values = {
            "certified_epsilon_spent_so_far": None if certified is None else certified.epsilon,
            "certified_epsilon_of_plan": None if whole is None else whole.epsilon,
            "paper_epsilon_heuristic": None if paper is None else paper.epsilon,
            "clipped_share": metrics.clipped_share,
            "median_sample_norm": metrics.median_norm,
        }
        return {key: value for key, value in values.items() if value is not None}


class StopWhenSpent(TrainerCallback):
    """Ends training when the ledger allows no further step (lost steps of a crash count too)."""

    def __init__(self, find_run: Callable[[], PrivateTraining | None]) -> None:
        self._find_run = find_run

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        private = self._find_run()
        if private is not None and private.finished:
            control.should_training_stop = True
        return control
