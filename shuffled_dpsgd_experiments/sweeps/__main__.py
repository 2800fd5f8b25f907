"""Run sweeps with the Python API and argparse alone, where the command line is not installed.

    python -m shuffled_dpsgd_experiments.sweeps sweeps/sst2.toml --model MiniLM --data sst2

SweepProgress goes to standard error, the table to standard output.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from shuffled_dpsgd_experiments.programs import errors_on_one_line
from shuffled_dpsgd_experiments.sweeps import (
    SweepProgress,
    load_sweep,
    run_in_jobs,
    run_sweeps,
    table_of,
)
from shuffled_dpsgd_experiments.sweeps.jobs import INCOMPLETE


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when every cell has a result, 3 when some are still missing.

    Raises:
        ShuffledDPError: cells raised; all others were tried.
    """
    parser = argparse.ArgumentParser(prog="sweeps", description=__doc__.split("\n", 1)[0])
    parser.add_argument("files", type=Path, nargs="+", help="sweeps in TOML")
    parser.add_argument("--model", help="the model's folder, in place of the file's")
    parser.add_argument("--data", help="the data's folder, in place of the file's")
    parser.add_argument("--results", type=Path, help="the folder of results, likewise: one sweep")
    parser.add_argument("--stop-after", type=float, help="start no cell after so many seconds")
    parser.add_argument("--jobs", type=int, default=1, help="processes that share the cells")
    parser.add_argument("--table", action="store_true", help="only draw the table")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.results is not None and len(options.files) > 1:
        parser.error("--results is for one sweep: the results of several would mix")
    sweeps = [
        load_sweep(file, model=options.model, data=options.data, results=options.results)
        for file in options.files
    ]
    if options.worker:
        done = run_sweeps(sweeps, stop_after=options.stop_after, is_replaced=True)
        return 0 if done else INCOMPLETE
    complete = options.table or run_in_jobs(
        sweeps,
        options.files,
        options.jobs,
        model=options.model,
        data=options.data,
        results=options.results,
        stop_after=options.stop_after,
        on_progress=say,
    )
    sys.stdout.write("\n".join(table_of(sweep) for sweep in sweeps))
    return 0 if complete else INCOMPLETE


def say(progress: SweepProgress) -> None:
    """A line on standard error."""
    print(progress.describe(), file=sys.stderr, flush=True)


if __name__ == "__main__":
    with errors_on_one_line():
        sys.exit(main())
