"""Runs what is missing of sweeps: tuning first, then the grid, most informative cells first.

A cell whose result is there is never run again, so a sweep that was killed goes on where it was.
The cell in progress then is started over; all its randomness follows from its seed. Whoever runs a
cell claims it by a lock, so commands that share a folder of results share the work.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from shuffled_dpsgd.errors import ShuffledDPError
from shuffled_dpsgd_experiments.sweeps.cell import Tasks, run_cell
from shuffled_dpsgd_experiments.sweeps.grid import Cell, Sweep
from shuffled_dpsgd_experiments.sweeps.search import merit
from shuffled_dpsgd_experiments.sweeps.store import Store

Run = Callable[[Cell, Tasks], dict[str, Any] | None]
Outcome = Literal["done", "taken", "stopped"]
POLL_SECONDS = 0.5
_MOST_NAMED, _MOST_CHARACTERS = 8, 600


@dataclass(frozen=True, kw_only=True)
class SweepProgress:
    """Where a sweep is, after each cell; `seconds` is None for a cell that was there.

    `seconds_left` is None as long as no cell was run that says how long one takes.
    """

    done: int
    total: int
    cell: Cell
    record: Mapping[str, Any]
    seconds: float | None
    seconds_left: float | None

    def describe(self) -> str:
        """One line for people."""
        name, score = self.record["score_name"], self.record["score"]
        found = f"{name} {'none' if score is None else f'{score:.4g}'}"
        took = "there already" if self.seconds is None else f"{self.seconds:.0f} s"
        left = "" if self.seconds_left is None else f"; about {self.seconds_left / 60:.1f} min left"
        return f"cell {self.done} of {self.total}: {self.cell.describe()}: {found}, {took}{left}"


def run_sweeps(
    sweeps: Sequence[Sweep],
    *,
    on_progress: Callable[[SweepProgress], object] = lambda progress: None,
    stop_after: float | None = None,
    run: Run = run_cell,
) -> bool:
    """Run every cell that has no result; True when all have one.

    Cells that other commands are at are waited for, after all others. No cell is started once
    `stop_after` seconds have passed. A signal ends the sweeps after the step in progress, without a
    result for the cell that was being run.

    Raises:
        ShuffledDPError: cells failed. Each was named at once on standard error, and stepped over;
            this comes when everything else has been tried.
    """
    return _Runner(sweeps, on_progress, stop_after, run).work()


class KnownCells:
    """The cells of a sweep whose settings are known, with their results, as a folder has them."""

    def __init__(self, sweep: Sweep) -> None:
        self.store = Store(sweep.results)
        self._sweep = sweep
        self._trials = sweep.tuning_cells()
        self._chosen: dict[str, dict[str, Any]] | None = None
        self._grid = list(sweep.main_cells({}))
        # The grid has as many cells whatever tuning chooses.
        self.total = len(self._trials) + len(self._grid)

    def read(self) -> list[tuple[Cell, Mapping[str, Any] | None]]:
        """All trials, then the grid; a method is part of it when all its trials have a result."""
        trials = [(cell, self.store.find(cell)) for cell in self._trials]
        open_ = {cell.method for cell, record in trials if record is None}
        chosen = choose((cell, record) for cell, record in trials if record is not None)
        if chosen != self._chosen:
            self._chosen, self._grid = chosen, list(self._sweep.main_cells(chosen))
        grid = [cell for cell in self._grid if cell.method not in open_]
        return [*trials, *((cell, self.store.find(cell)) for cell in grid)]

    def is_complete(self) -> bool:
        """Whether every cell has a result; asks the folder and runs nothing."""
        return sum(record is not None for _, record in self.read()) == self.total


def choose(trials: Iterable[tuple[Cell, Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """What to train each method with: the trial of the best score, the first of equals."""
    best: dict[str, tuple[float, dict[str, Any]]] = {}
    for cell, record in trials:
        value = merit(record)
        if cell.method not in best or value > best[cell.method][0]:
            best[cell.method] = value, dict(cell.tuned)
    return {method: tuned for method, (_, tuned) in best.items()}


class _Runner:
    """Tells of what is there, and runs what is not."""

    def __init__(
        self,
        sweeps: Sequence[Sweep],
        on_progress: Callable[[SweepProgress], object],
        stop_after: float | None,
        run: Run,
    ) -> None:
        self._sweeps = [KnownCells(sweep) for sweep in sweeps]
        self._total = sum(each.total for each in self._sweeps)
        self._tell, self._run, self._tasks = on_progress, run, Tasks()
        self._end = None if stop_after is None else time.monotonic() + stop_after
        self._told: set[tuple[str, str]] = set()
        self._failed: dict[tuple[str, str], Cell] = {}
        self._lacking: set[str] = set()
        self._times: list[float] = []

    def work(self) -> bool:
        """True when every cell has a result; False if time ran out or a signal came."""
        while hopeful := [each for each in self._missing() if each[1].key not in self._failed]:
            if self._end is not None and time.monotonic() >= self._end:
                break
            # One at a time: what comes next may depend on its result.
            outcomes = (self._attempt(store, cell) for store, cell in hopeful)
            outcome = next((each for each in outcomes if each != "taken"), "taken")
            if outcome == "stopped":
                return False
            if outcome == "taken":
                time.sleep(POLL_SECONDS)
        if self._failed:
            raise _all_failed([*self._failed.values()])
        return len(self._told) == self._total

    def _missing(self) -> list[tuple[Store, Cell]]:
        """Cells without a result, whose settings are known; the others are told of."""
        found = []
        for cells in self._sweeps:
            for cell, record in cells.read():
                if record is None:
                    found.append((cells.store, cell))
                else:
                    self._say(cell, record)
        return found

    def _attempt(self, store: Store, cell: Cell) -> Outcome:
        """Claim a cell, run it and write its result."""
        began = time.monotonic()
        with store.claim(cell) as mine:
            if not mine:
                return "taken"
            try:
                record = self._run(cell, self._tasks)
            except Exception as error:
                self._step_over(cell, why(error))
                return "done"
            if record is None:
                return "stopped"
            store.add(cell, record)
        self._times.append(time.monotonic() - began)
        self._say(cell, record, self._times[-1])
        return "done"

    def _step_over(self, cell: Cell, why: str) -> None:
        """Leave a cell that failed; end at once where all of them lack their data or model."""
        self._failed[cell.key] = cell
        if self._tasks.are_missing(cell.config):
            self._lacking.add(Tasks.key_of(cell.config))
        others = {Tasks.key_of(each.config) for _, each in self._missing()}
        if not self._times and others <= self._lacking:
            raise ShuffledDPError(why)
        print(f"error: cell failed: {cell.describe()}: {why}", file=sys.stderr, flush=True)

    def _say(self, cell: Cell, record: Mapping[str, Any], seconds: float | None = None) -> None:
        """Tell of a cell once, and how long the rest will take."""
        if cell.key in self._told:
            return
        self._told.add(cell.key)
        recent, done = self._times[-8:], len(self._told)
        left = (self._total - done) * sum(recent) / len(recent) if recent else None
        self._tell(
            SweepProgress(
                done=done,
                total=self._total,
                cell=cell,
                record=record,
                seconds=seconds,
                seconds_left=left,
            )
        )


def why(error: Exception) -> str:
    """An error on one line; one that nobody raised on purpose says where it comes from."""
    text = " ".join(str(error).split())
    text = text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}…"
    if isinstance(error, ShuffledDPError):
        return text
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}{f': {text}' if text else ''}{place}"


def _all_failed(cells: Sequence[Cell]) -> ShuffledDPError:
    """What a call ends with once everything but these cells has been tried."""
    names = "; ".join(cell.describe() for cell in cells[:_MOST_NAMED])
    more = f"; and {len(cells) - _MOST_NAMED} more" if len(cells) > _MOST_NAMED else ""
    number = "1 cell" if len(cells) == 1 else f"{len(cells)} cells"
    return ShuffledDPError(
        f"{number} failed: {names}{more}. Why stands above. Run the sweep again to try them again"
    )
