"""Runs what is missing of a sweep: tuning first, then the grid, most informative cells first.

A cell whose result is there is never run again, so a sweep that was killed goes on where it was.
The cell in progress then is started over; all its randomness follows from its seed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from shuffled_dpsgd_experiments.sweeps.cell import Tasks, run_cell
from shuffled_dpsgd_experiments.sweeps.grid import Cell, Sweep
from shuffled_dpsgd_experiments.sweeps.store import Store

LOWER_IS_BETTER = ("perplexity", "loss")
Run = Callable[[Cell, Tasks], dict[str, Any] | None]


@dataclass(frozen=True, kw_only=True)
class SweepProgress:
    """Where a sweep is, after each cell; `seconds` is None for a cell that was there."""

    done: int
    total: int
    cell: Cell
    record: Mapping[str, Any]
    seconds: float | None
    seconds_left: float

    def describe(self) -> str:
        """One line for people."""
        name, score = self.record["score_name"], self.record["score"]
        found = f"{name} {'none' if score is None else f'{score:.4g}'}"
        took = "there already" if self.seconds is None else f"{self.seconds:.0f} s"
        left = f"about {self.seconds_left / 60:.1f} min left"
        return f"cell {self.done} of {self.total}: {self.cell.describe()}: {found}, {took}; {left}"


def run_sweep(
    sweep: Sweep,
    *,
    on_progress: Callable[[SweepProgress], object] = lambda progress: None,
    stop_after: float | None = None,
    run: Run = run_cell,
) -> bool:
    """Run every cell that has no result; True when all have one.

    No cell is started once `stop_after` seconds have passed. A signal ends the sweep after the
    step in progress, without a result for the cell it was in.
    """
    worker = _Worker(sweep, on_progress, stop_after, run)
    trials = worker.run_all(sweep.tuning_cells())
    if trials is None:
        return False
    chosen = choose(trials)
    return worker.run_all(list(sweep.main_cells(chosen))) is not None


def choose(trials: Iterable[tuple[Cell, Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """What to train each method with: the trial of the best score, the first of equals."""
    best: dict[str, tuple[float, dict[str, Any]]] = {}
    for cell, record in trials:
        value = merit(record)
        if cell.method not in best or value > best[cell.method][0]:
            best[cell.method] = value, dict(cell.tuned)
    return {method: tuned for method, (_, tuned) in best.items()}


def merit(record: Mapping[str, Any]) -> float:
    """The score with a sign that makes more better; a run without a score is the worst."""
    score = record["score"]
    if score is None:
        return float("-inf")
    return -float(score) if record["score_name"] in LOWER_IS_BETTER else float(score)


class _Worker:
    def __init__(
        self,
        sweep: Sweep,
        on_progress: Callable[[SweepProgress], object],
        stop_after: float | None,
        run: Run,
    ) -> None:
        self._store = Store(sweep.results)
        self._tasks = Tasks()
        self._report = on_progress
        self._stop_after = stop_after
        self._run = run
        self._started = time.monotonic()
        # The grid has as many cells whatever tuning chooses.
        self._total = len(sweep.tuning_cells()) + len(list(sweep.main_cells({})))
        self._done = 0
        self._times: list[float] = []

    def run_all(self, cells: list[Cell]) -> list[tuple[Cell, Mapping[str, Any]]] | None:
        """Every cell with its result; None if time ran out or a signal came."""
        found: list[tuple[Cell, Mapping[str, Any]]] = []
        for cell in cells:
            record = self._store.find(cell)
            seconds = None
            if record is None:
                if self._out_of_time():
                    return None
                began = time.monotonic()
                record = self._run(cell, self._tasks)
                if record is None:
                    return None
                self._store.add(cell, record)
                seconds = time.monotonic() - began
                self._times.append(seconds)
            self._done += 1
            found.append((cell, record))
            self._report(self._progress(cell, record, seconds))
        return found

    def _out_of_time(self) -> bool:
        passed = time.monotonic() - self._started
        return self._stop_after is not None and passed >= self._stop_after

    def _progress(
        self, cell: Cell, record: Mapping[str, Any], seconds: float | None
    ) -> SweepProgress:
        recent = self._times[-8:]
        each = sum(recent) / len(recent) if recent else 0.0
        return SweepProgress(
            done=self._done,
            total=self._total,
            cell=cell,
            record=record,
            seconds=seconds,
            seconds_left=each * (self._total - self._done),
        )
