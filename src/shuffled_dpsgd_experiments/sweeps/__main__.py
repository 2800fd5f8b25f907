"""Run a sweep with the Python API and argparse alone, where the command line is not installed.

    python -m shuffled_dpsgd_experiments.sweeps sweeps/sst2.toml --model MiniLM --data sst2

SweepProgress goes to standard error, the table to standard output.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from shuffled_dpsgd_experiments.sweeps import (
    SweepProgress,
    load_sweep,
    run_in_jobs,
    run_sweep,
    table_of,
)
from shuffled_dpsgd_experiments.sweeps.jobs import INCOMPLETE


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when every cell has a result, 3 when some are still missing."""
    parser = argparse.ArgumentParser(prog="sweeps", description=__doc__.split("\n", 1)[0])
    parser.add_argument("file", type=Path, help="a sweep in TOML")
    parser.add_argument("--model", help="the model's folder, in place of the file's")
    parser.add_argument("--data", help="the data's folder, in place of the file's")
    parser.add_argument("--results", type=Path, help="the folder of results, likewise")
    parser.add_argument("--stop-after", type=float, help="start no cell after so many seconds")
    parser.add_argument("--jobs", type=int, default=1, help="processes that share the cells")
    parser.add_argument("--table", action="store_true", help="only draw the table")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    sweep = load_sweep(
        options.file, model=options.model, data=options.data, results=options.results
    )
    if options.worker:
        return 0 if run_sweep(sweep, stop_after=options.stop_after) else INCOMPLETE
    complete = options.table or run_in_jobs(
        sweep,
        options.file,
        options.jobs,
        model=options.model,
        data=options.data,
        stop_after=options.stop_after,
        on_progress=say,
    )
    sys.stdout.write(table_of(sweep))
    return 0 if complete else INCOMPLETE


def say(progress: SweepProgress) -> None:
    """A line on standard error."""
    print(progress.describe(), file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
