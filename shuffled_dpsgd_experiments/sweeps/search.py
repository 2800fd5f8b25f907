"""The best of a random number of runs, at the price of Papernot & Steinke (2022).

How many runs there are is drawn from a Poisson distribution before the first, and the settings of
each from the candidates, uniformly. Nothing but the best run is kept, not even their number: what
is said of the others, or of how many there were, is a release that the price does not cover. A
search that is stopped has spent its price, and starts over as another one.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from shuffled_dpsgd.accounting import BestOf, PrivacyClaim, claim_together
from shuffled_dpsgd.core.plan import PrivacyPlan
from shuffled_dpsgd.errors import InvalidArgumentError, require
from shuffled_dpsgd.tasks import Task
from shuffled_dpsgd.training.budget import BudgetFile, counted
from shuffled_dpsgd.training.record_digest import data_mark
from shuffled_dpsgd_experiments.sweeps.grid import Cell

Record = dict[str, Any]
LOWER_IS_BETTER = ("perplexity", "loss")


def run_search(
    cell: Cell,
    task: Task,
    *,
    plan_of: Callable[[Cell], PrivacyPlan],
    train: Callable[[Cell], Record | None],
) -> Record | None:
    """The best record, with the search's claim; a record without a score if no run was drawn.

    None if a signal stopped it.
    """
    assert cell.best_of is not None
    plan = plan_of(cell.candidates[0])
    claim = _price(cell, plan, plan_of)
    if cell.config.privacy.budget is not None:
        _count(BudgetFile(cell.config.privacy.budget), cell, task, plan)
    generator = np.random.default_rng(secrets.randbits(128))
    best: Record | None = None
    for _ in range(int(generator.poisson(cell.best_of))):
        chosen = cell.candidates[int(generator.integers(len(cell.candidates)))]
        found = train(chosen)
        if found is None:
            return None
        if best is None or merit(found) > merit(best):
            best = found
    if best is None:
        best = {"score_name": task.score_name, "score": None, "tuned": {}}
    own = {"sweep": cell.sweep, "stage": cell.stage, "method": cell.method, "seed": cell.seed}
    certified = {name: getattr(claim, name) for name in ("epsilon", "delta", "kind", "method")}
    return (
        best
        | own
        | {
            "epsilon": cell.epsilon,
            "best_of": cell.best_of,
            "certified": certified,
            "paper": None,
            "assumptions": list(claim.assumptions),
            "config": {
                **cell.described,
                "best_of": cell.best_of,
                "candidates": [dict(each.tuned) for each in cell.candidates],
            },
        }
    )


def _price(cell: Cell, plan: PrivacyPlan, plan_of: Callable[[Cell], PrivacyPlan]) -> PrivacyClaim:
    """The claim of a search; refuses candidates that are not priced alike."""
    expected = "runs whose ε can be certified, for best_of"
    require(
        not plan.uncertifiable, f"methods.{cell.method}", expected, "; ".join(plan.uncertifiable)
    )
    for each in cell.candidates[1:]:
        if plan_of(each).mechanism() != plan.mechanism():
            raise InvalidArgumentError(
                f"methods.{cell.method}.tuning",
                expected="runs of the same noise, sampling probability and steps, for best_of",
                got=", ".join(each.tuned),
                remedy="tune what does not change them, such as the learning rate",
            )
    assert cell.best_of is not None
    return claim_together([BestOf(run=plan.mechanism(), mean=cell.best_of)], plan.delta)


def _count(file: BudgetFile, cell: Cell, task: Task, plan: PrivacyPlan) -> None:
    """The search as a whole; what it draws and how far it gets must not be read off the file."""
    salt = file.read().salt
    entry = counted(plan, name=f"sweep {cell.sweep}: {cell.method}", salt=salt)
    entry = replace(entry, seed=None, best_of=cell.best_of, releases=plan.num_steps)
    file.enter(entry, data_mark(task.train_data, salt))


def merit(record: Mapping[str, Any]) -> float:
    """The score with a sign that makes more better; a run without a score is the worst."""
    score = record["score"]
    if score is None or not math.isfinite(score):
        return -math.inf
    return -float(score) if record["score_name"] in LOWER_IS_BETTER else float(score)
