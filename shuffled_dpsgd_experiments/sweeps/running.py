"""Runs what is missing of sweeps: tuning first, then the grid, most informative cells first.

A cell whose result is there is never run again, so a sweep that was killed goes on where it was.
The cell in progress then is started over; all its randomness follows from its seed. Processes that
share a folder of results share the work. A cell that raises is stepped over.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shuffled_dpsgd_experiments.sweeps.cell import Tasks, run_cell
from shuffled_dpsgd_experiments.sweeps.failures import CellFailedError, all_failed
from shuffled_dpsgd_experiments.sweeps.grid import Cell, Sweep
from shuffled_dpsgd_experiments.sweeps.search import merit
from shuffled_dpsgd_experiments.sweeps.store import Store

POLL_SECONDS = 0.5
ATTEMPTS = 2
"""Processes that a cell may cost before it is left to another call."""
Run = Callable[[Cell, Tasks], dict[str, Any] | None]


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


def run_sweep(
    sweep: Sweep,
    *,
    on_progress: Callable[[SweepProgress], object] = lambda progress: None,
    stop_after: float | None = None,
    run: Run = run_cell,
) -> bool:
    """Run every cell that has no result; True when all have one.

    No cell is started once `stop_after` seconds have passed. A signal ends the sweep after the
    step in progress, without a result for the cell it was in. Several processes may run one sweep
    at a time: each cell is run by one of them, and the last ones wait for each other.

    Raises:
        ShuffledDPError: cells raised. Each was named at once on standard error, and stepped over;
            this comes when everything else has been tried.
    """
    return run_sweeps([sweep], on_progress=on_progress, stop_after=stop_after, run=run)


def run_sweeps(
    sweeps: Sequence[Sweep],
    *,
    on_progress: Callable[[SweepProgress], object] = lambda progress: None,
    stop_after: float | None = None,
    is_replaced: bool = False,
    run: Run = run_cell,
) -> bool:
    """`run_sweep` for several: cells of a later one fill the time that an earlier one waits.

    A process that `is_replaced` ends with the first cell that raises, whatever that has done to
    its GPU, and a fresh one steps over cells that `ATTEMPTS` processes have ended with.
    """
    return _Worker(sweeps, on_progress, stop_after, is_replaced, run).work()


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


def is_complete(sweep: Sweep) -> bool:
    """Whether every cell has a result; asks the folder and runs nothing."""
    cells = KnownCells(sweep)
    return sum(record is not None for _, record in cells.read()) == cells.total


def choose(trials: Iterable[tuple[Cell, Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """What to train each method with: the trial of the best score, the first of equals."""
    best: dict[str, tuple[float, dict[str, Any]]] = {}
    for cell, record in trials:
        value = merit(record)
        if cell.method not in best or value > best[cell.method][0]:
            best[cell.method] = value, dict(cell.tuned)
    return {method: tuned for method, (_, tuned) in best.items()}


class _Worker:
    """One process at sweeps: reports what is there, claims what is not, waits for the others."""

    def __init__(
        self,
        sweeps: Sequence[Sweep],
        on_progress: Callable[[SweepProgress], object],
        stop_after: float | None,
        is_replaced: bool,
        run: Run,
    ) -> None:
        self._sweeps = [KnownCells(sweep) for sweep in sweeps]
        self._tasks = Tasks()
        self._stop_after = stop_after
        self._is_replaced = is_replaced
        self._failed: set[tuple[str, str]] = set()
        self._has_run = False
        self._run = run
        self._started = time.monotonic()
        self._reporter = Reporter(sum(each.total for each in self._sweeps), on_progress)

    def work(self) -> bool:
        """True when every cell has a result; False if time ran out or a signal came.

        False also if nothing is missing but cells that others ended with.
        """
        complete = self._run_missing()
        failed = [cell for _, cell in self._missing() if cell.key in self._failed]
        if failed:
            raise all_failed(failed)
        return complete

    def _run_missing(self) -> bool:
        while True:
            missing = self._missing()
            if not missing:
                return True
            hopeful = [(store, cell) for store, cell in missing if not self._given_up(store, cell)]
            if not hopeful:
                return False
            for store, cell in hopeful:
                if self._out_of_time():
                    return False
                ran = self._try(store, cell)
                if ran is None:
                    return False
                if ran:
                    break
            else:
                time.sleep(POLL_SECONDS)

    def _missing(self) -> list[tuple[Store, Cell]]:
        """Cells without a result, whose settings are known; the others are told of."""
        found = []
        for cells in self._sweeps:
            for cell, record in cells.read():
                if record is None:
                    found.append((cells.store, cell))
                else:
                    self._reporter.found(cell, record)
        return found

    def _given_up(self, store: Store, cell: Cell) -> bool:
        if self._is_replaced:
            return store.deaths(cell) >= ATTEMPTS
        return cell.key in self._failed

    def _try(self, store: Store, cell: Cell) -> bool | None:
        """Whether the cell was this process's to run, and was run; None if a signal came."""
        with store.claim(cell, keep_on_error=self._is_replaced) as mine:
            if not mine:
                return False
            began = time.monotonic()
            try:
                record = self._run(cell, self._tasks)
            except Exception as error:
                self._step_over(cell, error)
                return True
            if record is None:
                return None
            store.add(cell, record)
            self._has_run = True
        self._reporter.found(cell, record, time.monotonic() - began)
        return True

    def _step_over(self, cell: Cell, error: Exception) -> None:
        """Leave a cell that raised; raises what is not of one cell."""
        failure = CellFailedError(cell, error)
        if self._is_replaced:
            raise failure from error
        missing = (self._tasks.are_missing(other.config) for _, other in self._missing())
        if not self._has_run and all(missing):
            raise error  # None of them has its data and its model.
        self._failed.add(cell.key)
        failure.say()

    def _out_of_time(self) -> bool:
        passed = time.monotonic() - self._started
        return self._stop_after is not None and passed >= self._stop_after


class Reporter:
    """Tells of each cell once, and how long the rest will take `jobs` processes."""

    def __init__(
        self, total: int, on_progress: Callable[[SweepProgress], object], jobs: int = 1
    ) -> None:
        self._total = total
        self._tell = on_progress
        self._jobs = jobs
        self._told: set[tuple[str, str]] = set()
        self._times: list[float] = []

    def found(self, cell: Cell, record: Mapping[str, Any], seconds: float | None = None) -> None:
        """A cell has a result; `seconds` is None if it was there, or another process ran it."""
        if cell.key in self._told:
            return
        self._told.add(cell.key)
        if seconds is not None:
            self._times.append(seconds)
        recent = self._times[-8:]
        done = len(self._told)
        left = sum(recent) / len(recent) * (self._total - done) / self._jobs if recent else None
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
