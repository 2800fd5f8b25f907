"""A sweep by several processes at once, for a device that one of them does not fill.

Each is a process of its own, with its own data and kernels, that claims cells from the common
folder. This one only starts them, tells what they found, and ends them when it is ended.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from shuffled_dpsgd.errors import InvalidArgumentError, ShuffledDPError
from shuffled_dpsgd_experiments.sweeps.grid import Sweep
from shuffled_dpsgd_experiments.sweeps.running import (
    POLL_SECONDS,
    KnownCells,
    Reporter,
    SweepProgress,
    run_sweep,
)

INCOMPLETE = 3
"""Exit status of a process that ended with cells missing."""


def run_in_jobs(
    sweep: Sweep,
    file: Path,
    jobs: int,
    *,
    model: str | None = None,
    data: str | None = None,
    stop_after: float | None = None,
    on_progress: Callable[[SweepProgress], object] = lambda progress: None,
) -> bool:
    """Run a sweep that was read from `file` by `jobs` processes; True when all cells have a result.

    One job is this process. `model` and `data` are those that the sweep was read with.

    Raises:
        ShuffledDPError: cells are missing and a process failed; what it said is on standard error.
    """
    if jobs < 1:
        raise InvalidArgumentError("--jobs", expected="at least 1", got=jobs)
    if jobs == 1:
        return run_sweep(sweep, on_progress=on_progress, stop_after=stop_after)
    options = {"--model": model, "--data": data, "--stop-after": stop_after}
    given = [f"{name}={value}" for name, value in options.items() if value is not None]
    command = [sys.executable, "-m", "shuffled_dpsgd_experiments.sweeps", str(file), *given]
    command += [f"--results={sweep.results}", "--worker"]
    board = _Board(sweep, on_progress, jobs)
    board.read(new=False)
    workers = [subprocess.Popen(command) for _ in range(jobs)]

    def pass_on(number: int, frame: FrameType | None) -> None:
        # Ctrl-C reaches every process of a terminal by itself, and a second one would kill them.
        for worker in workers if number == signal.SIGTERM else ():
            worker.send_signal(number)

    before = {each: signal.signal(each, pass_on) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        while any(worker.poll() is None for worker in workers):
            board.read()
            time.sleep(POLL_SECONDS)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    complete = board.read()
    failed = [w.returncode for w in workers if w.returncode not in (0, INCOMPLETE)]
    if failed and not complete:
        raise ShuffledDPError(
            f"{len(failed)} of {jobs} processes failed (status {failed[0]}) and cells are missing; "
            "what they said stands above. Run the sweep again to go on"
        )
    return complete


class _Board:
    """What the folder of results shows of a sweep."""

    def __init__(
        self, sweep: Sweep, on_progress: Callable[[SweepProgress], object], jobs: int
    ) -> None:
        self._cells = KnownCells(sweep)
        self._reporter = Reporter(self._cells.total, on_progress, jobs)

    def read(self, *, new: bool = True) -> bool:
        """Tell of results not told of yet; True when all are there."""
        count = 0
        for cell, record in self._cells.read():
            if record is not None:
                count += 1
                seconds = record.get("seconds", {}).get("whole") if new else None
                self._reporter.found(cell, record, seconds)
        return count == self._cells.total
