"""Sweeps by several processes at once, for a device that one of them does not fill.

Each is a process of its own, with its own data and kernels, that claims cell after cell from the
common folders. This one only starts them, tells what they found, puts a fresh one in the place of
one that died or that a cell has ended, and ends them when it is ended.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from shuffled_dpsgd.errors import InvalidArgumentError, ShuffledDPError
from shuffled_dpsgd_experiments.sweeps.failures import all_failed
from shuffled_dpsgd_experiments.sweeps.grid import Cell, Sweep
from shuffled_dpsgd_experiments.sweeps.running import (
    POLL_SECONDS,
    KnownCells,
    Reporter,
    SweepProgress,
    run_sweeps,
)

INCOMPLETE = 3
"""Exit status of a process that ended with cells missing."""


def run_in_jobs(
    sweeps: Sequence[Sweep],
    files: Sequence[Path],
    jobs: int,
    *,
    model: str | None = None,
    data: str | None = None,
    results: Path | None = None,
    budget: Path | None = None,
    stop_after: float | None = None,
    on_progress: Callable[[SweepProgress], object] = lambda progress: None,
) -> bool:
    """Run sweeps that were read from `files` by `jobs` processes; True when all have their results.

    One job is this process. `model` to `budget` are those that they were read with.

    Raises:
        ShuffledDPError: cells are missing because they raised, or because a process failed; what
            was said of it is on standard error.
    """
    if jobs < 1:
        raise InvalidArgumentError("--jobs", expected="at least 1", got=jobs)
    if jobs == 1:
        return run_sweeps(sweeps, on_progress=on_progress, stop_after=stop_after)
    options = {"--model": model, "--data": data, "--results": results, "--budget": budget}
    command = [sys.executable, "-m", "shuffled_dpsgd", "sweep", *map(str, files)]
    command += [f"{name}={value}" for name, value in options.items() if value is not None]
    board = _Board(sweeps, on_progress, jobs)
    workers = _Workers([*command, "--worker"], jobs, stop_after)
    with workers.told_of_signals():
        while workers.running:
            board.read()
            workers.replace_failed(board.count)
            time.sleep(POLL_SECONDS)
    complete = board.read()
    if workers.failed and not complete:
        if failed := board.failed():
            raise all_failed(failed)
        raise ShuffledDPError(
            f"{len(workers.failed)} processes failed (status {workers.failed[0]}) and cells are "
            "missing; what they said stands above. Run the sweep again to go on"
        )
    return complete


class _Workers:
    """The processes: as many as asked for, until their work is done or cannot be."""

    def __init__(self, command: Sequence[str], jobs: int, stop_after: float | None) -> None:
        self._command = list(command)
        self._stop_after = stop_after
        self._started = time.monotonic()
        self._stopping = False
        self._jobs = jobs
        self._in_vain = 0
        self._known = 0
        self.failed: list[int] = []
        self.running = [self._start() for _ in range(jobs)]

    def _start(self) -> subprocess.Popen[bytes]:
        command = list(self._command)
        if self._stop_after is not None:
            passed = time.monotonic() - self._started
            command.append(f"--stop-after={max(self._stop_after - passed, 0.0)}")
        return subprocess.Popen(command)

    def replace_failed(self, results: int) -> None:
        """A fresh process for each that died, but not forever if there are no new results."""
        if results > self._known:
            self._known, self._in_vain = results, 0
        ended = [worker for worker in self.running if worker.poll() is not None]
        self.running = [worker for worker in self.running if worker not in ended]
        for worker in ended:
            if worker.returncode in (0, INCOMPLETE):
                continue
            self.failed.append(worker.returncode)
            if not self._stopping and self._in_vain < self._jobs:
                self._in_vain += 1
                self.running.append(self._start())

    @contextmanager
    def told_of_signals(self) -> Iterator[None]:
        """Pass a request to end on, and start nothing after it."""

        def pass_on(number: int, frame: FrameType | None) -> None:
            self._stopping = True
            # Ctrl-C reaches every process of a terminal by itself; a second would kill them.
            for worker in self.running if number == signal.SIGTERM else ():
                worker.send_signal(number)

        before = {each: signal.signal(each, pass_on) for each in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


class _Board:
    """What the folders of results show of sweeps."""

    def __init__(
        self, sweeps: Sequence[Sweep], on_progress: Callable[[SweepProgress], object], jobs: int
    ) -> None:
        self._sweeps = [KnownCells(sweep) for sweep in sweeps]
        self._total = sum(each.total for each in self._sweeps)
        self._reporter = Reporter(self._total, on_progress, jobs)
        self.count = 0
        for each in self._sweeps:
            each.store.forget_deaths()
        self._read(new=False)

    def read(self) -> bool:
        """Tell of results not told of yet; True when all are there."""
        return self._read(new=True)

    def failed(self) -> list[Cell]:
        """Cells without a result that processes have ended with."""
        return [
            cell
            for each in self._sweeps
            for cell, record in each.read()
            if record is None and each.store.deaths(cell)
        ]

    def _read(self, *, new: bool) -> bool:
        self.count = 0
        for cells in self._sweeps:
            for cell, record in cells.read():
                if record is not None:
                    self.count += 1
                    seconds = record.get("seconds", {}).get("whole") if new else None
                    self._reporter.found(cell, record, seconds)
        return self.count == self._total
