"""`shuffled-dpsgd sweep`: a grid of methods, budgets and seeds, one result per cell."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shuffled_dpsgd.cli.experiments import need_experiments
from shuffled_dpsgd.cli.output import AsJson, print_json, reports_errors
from shuffled_dpsgd.cli.privacy_options import BudgetFile
from shuffled_dpsgd.errors import InvalidArgumentError

if TYPE_CHECKING:
    from shuffled_dpsgd_experiments.sweeps import SweepProgress

EPILOG = (
    "Examples: [bold]shuffled-dpsgd sweep sweeps/digits.toml[/bold] · "
    "[bold]shuffled-dpsgd sweep sweeps/sst2.toml --model MiniLM --data sst2 --table[/bold]"
)
INCOMPLETE = 3


@reports_errors
def sweep(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="One sweep in TOML, or several.")
    ],
    model: Annotated[
        str | None, typer.Option(help="The model's folder, in place of the file's.")
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="The data's folder, in place of the file's.")
    ] = None,
    results: Annotated[
        Path | None, typer.Option(help="The folder of results, likewise; for one sweep.")
    ] = None,
    budget: BudgetFile = None,
    stop_after: Annotated[
        float | None, typer.Option(help="Start no cell after so many seconds.")
    ] = None,
    jobs: Annotated[int, typer.Option(help="Processes that share the cells.")] = 1,
    table: Annotated[bool, typer.Option("--table", help="Only draw the table.")] = False,
    worker: Annotated[bool, typer.Option("--worker", hidden=True)] = False,
    as_json: AsJson = False,
) -> None:
    """Run what is missing of a sweep and draw its table: mean ± sd over seeds.

    Each cell is one JSON file that is never edited. A sweep that was stopped, or killed, goes on
    where it was; exit status 3 says that cells are missing. A cell that fails is named, with the
    reason, and stepped over; exit status 2 then says so. Of several sweeps, cells of a later one
    fill the time in which an earlier one has too few for all processes. Needs a clone.
    """
    need_experiments("sweep")
    from shuffled_dpsgd_experiments.sweeps import load_sweep, run_in_jobs, run_sweeps, table_of
    from shuffled_dpsgd_experiments.sweeps.running import is_complete
    from shuffled_dpsgd_experiments.sweeps.table import ordered_rows

    if results is not None and len(files) > 1:
        raise InvalidArgumentError(
            "--results", expected="one sweep: the results of several would mix", got=len(files)
        )
    sweeps = [
        load_sweep(file, model=model, data=data, results=results, budget=budget) for file in files
    ]
    if worker:  # One of the processes of --jobs; the one that started it says what was found.
        if run_sweeps(sweeps, stop_after=stop_after, is_replaced=True):
            return
        raise typer.Exit(INCOMPLETE)
    if table:
        complete = all(map(is_complete, sweeps))
    else:
        complete = run_in_jobs(
            sweeps,
            files,
            jobs,
            model=model,
            data=data,
            results=results,
            budget=budget,
            stop_after=stop_after,
            on_progress=_quiet if as_json else _say,
        )
    if as_json:
        rows = [
            {"sweep": each.name, **row.to_json()} for each in sweeps for row in ordered_rows(each)
        ]
        print_json({"complete": complete, "rows": rows})
    else:
        typer.echo("\n".join(table_of(each) for each in sweeps), nl=False)
    if not complete and not table:
        raise typer.Exit(INCOMPLETE)


def _say(progress: SweepProgress) -> None:
    typer.echo(progress.describe(), err=True)


def _quiet(progress: SweepProgress) -> None:
    """Nothing: with --json only the result is printed."""
