"""What ties a record to what made it: commit, streams, digests of weights and data, first losses.

Records that have no commit are listed in `results/code.json`, with the one that committed them.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from torch import nn

from shuffled_dpsgd.core.streams import STREAM_VERSION
from shuffled_dpsgd.errors import ShuffledDPError
from shuffled_dpsgd.training.data import MapStyle
from shuffled_dpsgd.training.loop import Progress
from shuffled_dpsgd.training.record_digest import digest

FIRST_STEPS = 5
_KEY = b"frontier"


class Provenance:
    """Of one run: made before the first step, and a callback of the loop."""

    def __init__(self, model: nn.Module, data: str) -> None:
        self._weights, self._data = weights_digest(model), data
        self._losses: list[float] = []

    def __call__(self, progress: Progress) -> None:
        if progress.metrics.loss is not None:
            self._losses.append(progress.metrics.loss)

    def to_json(self, losses: Iterable[float | None] = ()) -> dict[str, Any]:
        """For the run's record; `losses` are those of its steps, where it was no callback."""
        seen = [*self._losses, *(loss for loss in losses if loss is not None)]
        return {
            "first_losses": [round(loss, 6) for loss in seen[:FIRST_STEPS]],
            "initial_weights": self._weights,
            "data": self._data,
            **code(),
        }


def code() -> dict[str, Any]:
    """What runs now: the commit, and the version of its streams of random numbers."""
    return {"commit": commit(), "streams": STREAM_VERSION}


def weights_digest(model: nn.Module) -> str:
    """Of every tensor of a model, by name."""
    return data_digest([(name, tensor) for name, tensor in sorted(model.state_dict().items())])


def data_digest(records: MapStyle | Sequence[Any]) -> str:
    """Of all records in their order."""
    return digest(records, _KEY)[:16]


@cache
def commit() -> str:
    """The commit of the code that runs, with a mark if files of it have been changed.

    Raises:
        ShuffledDPError: the code is not in a git repository.
    """
    folder = Path(__file__).parents[1]

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise ShuffledDPError(
                f"{folder}: every record names the commit that made it, and git says "
                f"{done.stderr.strip()}; run this in a clone"
            )
        return done.stdout.strip()

    changed = git("status", "--porcelain", "--", "src", "shuffled_dpsgd_experiments")
    return git("rev-parse", "HEAD") + ("-changed" if changed else "")
