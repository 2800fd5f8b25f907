"""One private run at a time on a model and an optimizer: a new one closes the one before.

In a notebook a cell is run again, and the run it made before would still guard the optimizer.
"""

from __future__ import annotations

import warnings
import weakref
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from shuffled_dpsgd.training.private import PrivateTraining

_RUNS: weakref.WeakValueDictionary[int, PrivateTraining] = weakref.WeakValueDictionary()
_SUPERSEDED = "make_private was called again on its model or its optimizer"


def close_predecessors(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Close any run that still holds the model or the optimizer, and say so."""
    for run in {id(r): r for r in _RUNS.values()}.values():
        if run.closed or not (run.model is model or run.optimizer is optimizer):
            continue
        run.close(because=_SUPERSEDED)
        warnings.warn(
            f"an earlier private run holds this model or optimizer: it is closed after "
            f"{run.steps_taken} steps. What it spent stays spent, and a new run on the same "
            "records adds to it; the model and optimizer are as it left them",
            UserWarning,
            stacklevel=4,
        )


def remember_run(run: PrivateTraining) -> None:
    """So that a successor can find it; nothing is kept alive."""
    _RUNS[id(run)] = run
