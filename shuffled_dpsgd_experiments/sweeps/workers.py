"""Who runs a cell of a sweep: this process, or one of several.

A worker claims its cell by a lock of the operating system before it runs it, so nothing is run
twice and nobody waits for the dead.
"""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from shuffled_dpsgd.errors import ShuffledDPError
from shuffled_dpsgd_experiments.sweeps.cell import Tasks
from shuffled_dpsgd_experiments.sweeps.grid import Cell
from shuffled_dpsgd_experiments.sweeps.store import Store

Run = Callable[[Cell, Tasks], dict[str, Any] | None]
_MOST_CHARACTERS = 600


@dataclass(frozen=True, kw_only=True)
class CellOutcome:
    """What became of a cell that a worker was given.

    `taken`: another process runs it or has run it. `stopped`: a signal came. `lacks` says that its
    data or its model could not be had.
    """

    kind: Literal["found", "taken", "stopped", "failed"]
    seconds: float = 0.0
    why: str = ""
    lacks: bool = False


class Worker:
    """This process, which is busy until a cell is done. `at` is the cell that `future` is of."""

    def __init__(self, run: Run) -> None:
        self.at: tuple[Store, Cell] | None = None
        self.future: Future[CellOutcome] = Future()
        self._run, self._tasks = run, Tasks()

    def start(self, store: Store, cell: Cell) -> None:
        self.at, self.future = (store, cell), Future()
        self.future.set_result(attempt(store.directory, cell, self._run, self._tasks))

    def outcome(self) -> CellOutcome:
        """What became of the cell, once it is done."""
        return self.future.result()

    def close(self) -> None:
        """End what it has started."""


class OtherProcess(Worker):
    """A process of its own, with its own data and kernels.

    One that has failed is replaced by a fresh one, whatever it has done to its GPU.
    """

    _pool: ProcessPoolExecutor | None = None

    def start(self, store: Store, cell: Cell) -> None:
        if self._pool is None:
            spawn = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(max_workers=1, mp_context=spawn)
        self.at = store, cell
        self.future = self._pool.submit(attempt, store.directory, cell, self._run)

    def outcome(self) -> CellOutcome:
        try:
            found = super().outcome()
        except BrokenProcessPool:
            found = CellOutcome(kind="failed", why="its process ended, or was killed")
        if found.kind == "failed":
            self.close()
        return found

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
        self._pool = None


@cache
def _own_tasks() -> Tasks:
    """Those of a process that does nothing but run cells."""
    return Tasks()


def attempt(folder: Path, cell: Cell, run: Run, tasks: Tasks | None = None) -> CellOutcome:
    """Claim a cell, run it and write its result."""
    store, tasks = Store(folder), tasks or _own_tasks()
    with store.claim(cell) as mine:
        if not mine:
            return CellOutcome(kind="taken")
        began = time.monotonic()
        try:
            record = run(cell, tasks)
        except Exception as error:
            return CellOutcome(kind="failed", why=why(error), lacks=tasks.are_missing(cell.config))
        if record is None:
            return CellOutcome(kind="stopped")
        store.add(cell, record)
        return CellOutcome(kind="found", seconds=time.monotonic() - began)


def why(error: Exception) -> str:
    """An error on one line; one that nobody raised on purpose says where it comes from."""
    text = " ".join(str(error).split())
    text = text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}…"
    if isinstance(error, ShuffledDPError):
        return text
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}{f': {text}' if text else ''}{place}"
