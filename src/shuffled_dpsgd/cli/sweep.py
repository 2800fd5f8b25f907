"""`shuffled-dpsgd sweep`: a grid of methods, budgets and seeds, one result per cell."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shuffled_dpsgd.cli.output import AsJson, print_json, reports_errors

if TYPE_CHECKING:
    from shuffled_dpsgd_experiments.sweeps import SweepProgress

EPILOG = (
    "Examples: [bold]shuffled-dpsgd sweep sweeps/digits.toml[/bold] · "
    "[bold]shuffled-dpsgd sweep sweeps/sst2.toml --model MiniLM --data sst2 --table[/bold]"
)
INCOMPLETE = 3


@reports_errors
def sweep(
    file: Annotated[Path, typer.Argument(help="A sweep in TOML.")],
    model: Annotated[
        str | None, typer.Option(help="The model's folder, in place of the file's.")
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="The data's folder, in place of the file's.")
    ] = None,
    results: Annotated[Path | None, typer.Option(help="The folder of results, likewise.")] = None,
    stop_after: Annotated[
        float | None, typer.Option(help="Start no cell after so many seconds.")
    ] = None,
    jobs: Annotated[int, typer.Option(help="Processes that share the cells.")] = 1,
    table: Annotated[bool, typer.Option("--table", help="Only draw the table.")] = False,
    as_json: AsJson = False,
) -> None:
    """Run what is missing of a sweep and draw its table: mean ± sd over seeds.

    Each cell is one JSON file that is never edited. A sweep that was stopped, or killed, goes on
    where it was; exit status 3 says that cells are missing.
    """
    from shuffled_dpsgd_experiments.sweeps import load_sweep, run_in_jobs, table_of
    from shuffled_dpsgd_experiments.sweeps.table import read_records, rows_of

    loaded = load_sweep(file, model=model, data=data, results=results)
    complete = table or run_in_jobs(
        loaded,
        file,
        jobs,
        model=model,
        data=data,
        stop_after=stop_after,
        on_progress=_quiet if as_json else _say,
    )
    if as_json:
        rows = rows_of(read_records(loaded.results))
        print_json({"complete": complete, "rows": [row.to_json() for row in rows]})
    else:
        typer.echo(table_of(loaded), nl=False)
    if not complete:
        raise typer.Exit(INCOMPLETE)


def _say(progress: SweepProgress) -> None:
    typer.echo(progress.describe(), err=True)


def _quiet(progress: SweepProgress) -> None:
    """Nothing: with --json only the result is printed."""
