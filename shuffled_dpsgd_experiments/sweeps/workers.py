"""Who runs a cell of a sweep: this process, or one of several.

A worker claims its cell by a lock of the operating system before it runs it, so nothing is run
twice and nobody waits for the dead.
"""

from __future__ import annotations

import multiprocessing
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, Protocol

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


class Worker(Protocol):
    """Whatever runs one cell at a time; `at` is the one it is at."""

    at: tuple[Store, Cell] | None

    def start(self, store: Store, cell: Cell) -> None: ...

    def outcome(self) -> CellOutcome | None:
        """What became of the cell; None while it is being run."""


class Here:
    """This process, which is busy until a cell is done."""

    def __init__(self, run: Run) -> None:
        self.at: tuple[Store, Cell] | None = None
        self._run, self._tasks = run, Tasks()
        self._outcome: CellOutcome | None = None

    def start(self, store: Store, cell: Cell) -> None:
        self.at = store, cell
        self._outcome = attempt(store, cell, self._tasks, self._run)

    def outcome(self) -> CellOutcome | None:
        return self._outcome


class Process:
    """A process of its own, with its own data and kernels.

    One that has failed is replaced by a fresh one, whatever it has done to its GPU.
    """

    def __init__(self, run: Run) -> None:
        self.at: tuple[Store, Cell] | None = None
        self.pipe: Connection
        self._run = run
        self._process: Any = None

    def start(self, store: Store, cell: Cell) -> None:
        self.at = store, cell
        if self._process is None:
            context = multiprocessing.get_context("spawn")
            self.pipe, there = context.Pipe()
            self._process = context.Process(target=serve, args=(there, self._run))
            self._process.start()
            there.close()
        self.pipe.send((store.directory, cell))

    def outcome(self) -> CellOutcome | None:
        if not self.pipe.poll():
            return None
        try:
            found: CellOutcome = self.pipe.recv()
        except EOFError:
            self._process.join()
            status = self._process.exitcode
            found = CellOutcome(kind="failed", why=f"its process ended with status {status}")
        if found.kind == "failed":
            self.close()
        return found

    def stop(self, number: int) -> None:
        """Pass a signal on. Ctrl-C reaches every process of a terminal by itself."""
        if self._process is not None and number == signal.SIGTERM:
            self._process.terminate()

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self.pipe.close()
        self._process = None


def serve(pipe: Connection, run: Run) -> None:
    """One of several processes: runs the cells that it is sent until nobody sends any."""
    tasks = Tasks()
    while True:
        try:
            folder, cell = pipe.recv()
        except EOFError:
            return
        pipe.send(attempt(Store(folder), cell, tasks, run))


def attempt(store: Store, cell: Cell, tasks: Tasks, run: Run) -> CellOutcome:
    """Claim a cell, run it and write its result."""
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
