"""What is said of cells that raised: one line for each at once, and their names at the end."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from shuffled_dpsgd.errors import ShuffledDPError
from shuffled_dpsgd_experiments.sweeps.grid import Cell

_MOST_NAMED = 8
_MOST_CHARACTERS = 600


class CellFailedError(ShuffledDPError):
    """One cell raised; says which, and why."""

    def __init__(self, cell: Cell, error: Exception) -> None:
        super().__init__(f"cell failed: {cell.describe()}: {why(error)}")

    def say(self) -> None:
        """A line on standard error, as a process that ends by it has one."""
        print(f"error: {self}", file=sys.stderr, flush=True)


def why(error: Exception) -> str:
    """An error on one line; one that nobody raised on purpose says where it comes from."""
    text = " ".join(str(error).split())
    text = text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}…"
    if isinstance(error, ShuffledDPError):
        return text
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}{f': {text}' if text else ''}{place}"


def all_failed(cells: Sequence[Cell]) -> ShuffledDPError:
    """What a call ends with once everything but these cells has been tried."""
    names = "; ".join(cell.describe() for cell in cells[:_MOST_NAMED])
    more = f"; and {len(cells) - _MOST_NAMED} more" if len(cells) > _MOST_NAMED else ""
    number = "1 cell" if len(cells) == 1 else f"{len(cells)} cells"
    return ShuffledDPError(
        f"{number} failed: {names}{more}. Why stands above. Run the sweep again to try them again"
    )
