"""Runs what is missing of sweeps: tuning first, then the grid, most informative cells first.

A cell whose result is there is never run again, so a sweep that was killed goes on where it was.
The cell in progress then is started over; all its randomness follows from its seed. Cells are run
by this process, or by several at once for a device that one does not fill. Whoever runs a cell
claims it by a lock, so commands that share a folder of results share the work.
"""

from __future__ import annotations

import multiprocessing
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

from shuffled_dpsgd.errors import InvalidArgumentError, ShuffledDPError
from shuffled_dpsgd_experiments.sweeps.cell import Tasks, run_cell
from shuffled_dpsgd_experiments.sweeps.grid import Cell, Sweep
from shuffled_dpsgd_experiments.sweeps.search import merit
from shuffled_dpsgd_experiments.sweeps.store import Store
from shuffled_dpsgd_experiments.sweeps.workers import CellOutcome, OtherProcess, Run, Worker

POLL_SECONDS = 0.5
ATTEMPTS = 2
"""Processes of several that a cell may cost before it is left to another call."""
_MOST_NAMED = 8


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
    jobs: int = 1,
    on_progress: Callable[[SweepProgress], object] = lambda progress: None,
    stop_after: float | None = None,
    run: Run = run_cell,
) -> bool:
    """Run every cell that has no result; True when all have one.

    Cells of a later sweep fill the time that an earlier one waits. No cell is started once
    `stop_after` seconds have passed. A signal ends the sweeps after the step in progress, without
    results for the cells that were being run. One job is this process.

    Raises:
        ShuffledDPError: cells failed. Each was named at once on standard error, and stepped over;
            this comes when everything else has been tried.
    """
    if jobs < 1:
        raise InvalidArgumentError("--jobs", expected="at least 1", got=jobs)
    if jobs == 1:
        return _Scheduler(sweeps, [Worker(run)], on_progress, stop_after).work()
    processes = [OtherProcess(run) for _ in range(jobs)]
    scheduler = _Scheduler(sweeps, processes, on_progress, stop_after, ATTEMPTS)
    try:
        with _passed_on(scheduler):
            return scheduler.work()
    finally:
        for process in processes:
            process.close()


@contextmanager
def _passed_on(scheduler: _Scheduler) -> Iterator[None]:
    """Pass a request to end on to the processes, and start nothing after it.

    Ctrl-C reaches every process of a terminal by itself.
    """

    def pass_on(number: int, frame: FrameType | None) -> None:
        scheduler.is_stopping = True
        for process in multiprocessing.active_children() if number == signal.SIGTERM else ():
            process.terminate()

    before = {each: signal.signal(each, pass_on) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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


class _Scheduler:
    """Tells of what is there, and gives what is not to workers that have nothing to do."""

    def __init__(
        self,
        sweeps: Sequence[Sweep],
        workers: Sequence[Worker],
        on_progress: Callable[[SweepProgress], object],
        stop_after: float | None,
        attempts: int = 1,
    ) -> None:
        self.is_stopping = False
        self._sweeps = [KnownCells(sweep) for sweep in sweeps]
        self._total = sum(each.total for each in self._sweeps)
        self._workers = workers
        self._attempts = attempts
        self._tell = on_progress
        self._end = None if stop_after is None else time.monotonic() + stop_after
        self._told: set[tuple[str, str]] = set()
        self._failures: Counter[tuple[str, str]] = Counter()
        self._lacking: set[str] = set()
        self._taken: set[tuple[str, str]] = set()
        self._times: list[float] = []

    def work(self) -> bool:
        """True when every cell has a result; False if time ran out or a signal came."""
        while True:
            hopeful = [
                (store, cell)
                for store, cell in self._missing()
                if self._failures[cell.key] < self._attempts
            ]
            if not self._is_over():
                self._give_out(hopeful)
            busy = [worker for worker in self._workers if worker.at is not None]
            if not busy and (self._is_over() or not hopeful):
                break
            waiting = {worker.future: worker for worker in busy}
            done = wait(waiting, POLL_SECONDS, FIRST_COMPLETED).done
            for future in done:
                self._collect(waiting[future])
            if not done:  # Others may have ended what they had taken.
                self._taken.clear()
                time.sleep(0.0 if busy else POLL_SECONDS)
        failed = [cell for _, cell in self._missing() if self._failures[cell.key]]
        if failed:
            raise _all_failed(failed)
        return len(self._told) == self._total

    def _missing(self) -> list[tuple[Store, Cell]]:
        """Cells without a result, whose settings are known; the others are told of.

        A worker that has just written one says so itself, and how long it took.
        """
        found, running = [], self._running()
        for cells in self._sweeps:
            for cell, record in cells.read():
                if record is None:
                    found.append((cells.store, cell))
                elif cell.key not in running:
                    self._say(cell, record)
        return found

    def _running(self) -> set[tuple[str, str]]:
        return {worker.at[1].key for worker in self._workers if worker.at is not None}

    def _is_over(self) -> bool:
        return self.is_stopping or (self._end is not None and time.monotonic() >= self._end)

    def _give_out(self, hopeful: Iterable[tuple[Store, Cell]]) -> None:
        given = self._taken | self._running()
        waiting = iter([each for each in hopeful if each[1].key not in given])
        for worker in self._workers:
            if worker.at is None and (chosen := next(waiting, None)) is not None:
                worker.start(*chosen)

    def _collect(self, worker: Worker) -> None:
        outcome = worker.outcome()
        assert worker.at is not None
        (store, cell), worker.at = worker.at, None
        if outcome.kind == "found":
            self._times.append(outcome.seconds)
            self._say(cell, store.find(cell) or {}, outcome.seconds)
        elif outcome.kind == "taken":
            self._taken.add(cell.key)
        elif outcome.kind == "stopped" or self.is_stopping:
            self.is_stopping = True
        else:
            self._step_over(cell, outcome)

    def _step_over(self, cell: Cell, outcome: CellOutcome) -> None:
        """Leave a cell that failed; end at once where all of them lack their data or model."""
        self._failures[cell.key] += 1
        if outcome.lacks:
            self._lacking.add(Tasks.key_of(cell.config))
        others = {Tasks.key_of(each.config) for _, each in self._missing()}
        if not self._times and others <= self._lacking:
            raise ShuffledDPError(outcome.why)
        print(f"error: cell failed: {cell.describe()}: {outcome.why}", file=sys.stderr, flush=True)

    def _say(self, cell: Cell, record: Mapping[str, Any], seconds: float | None = None) -> None:
        """Tell of a cell once, and how long the rest will take."""
        if cell.key in self._told:
            return
        self._told.add(cell.key)
        recent, done = self._times[-8:], len(self._told)
        left = sum(recent) / len(recent) / len(self._workers) if recent else None
        self._tell(
            SweepProgress(
                done=done,
                total=self._total,
                cell=cell,
                record=record,
                seconds=seconds,
                seconds_left=None if left is None else left * (self._total - done),
            )
        )


def _all_failed(cells: Sequence[Cell]) -> ShuffledDPError:
    """What a call ends with once everything but these cells has been tried."""
    names = "; ".join(cell.describe() for cell in cells[:_MOST_NAMED])
    more = f"; and {len(cells) - _MOST_NAMED} more" if len(cells) > _MOST_NAMED else ""
    number = "1 cell" if len(cells) == 1 else f"{len(cells)} cells"
    return ShuffledDPError(
        f"{number} failed: {names}{more}. Why stands above. Run the sweep again to try them again"
    )
