"""The verbs of the command that are there in a clone alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shuffled_dpsgd.cli.output import AsJson, print_json, verb
from shuffled_dpsgd.cli.privacy_options import BudgetFile
from shuffled_dpsgd.errors import InvalidArgumentError, require
from shuffled_dpsgd_experiments.examination.verb import examine as examine

if TYPE_CHECKING:
    from shuffled_dpsgd_experiments.exhibits import Reproduced

INCOMPLETE = 3


@verb("reproduce fig1 fig3 --output figures", "reproduce table7", "reproduce all --from-results")
def reproduce(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            help="What to rebuild: frontier, fig1 to fig4, table1 to table8, claims, or all."
        ),
    ] = None,
    scale: Annotated[
        str,
        typer.Option(
            help="demo: minutes on two cores; of table4 and table5 nothing runs, committed runs "
            "are shown. paper: a GPU, the checkpoints and the data.",
            metavar="demo|paper",
        ),
    ] = "demo",
    from_results: Annotated[
        bool, typer.Option("--from-results", help="Run nothing: show what is in --output.")
    ] = False,
    output: Annotated[Path, typer.Option(help="Where results are and go.")] = Path("results"),
    data: Annotated[
        Path | None,
        typer.Option(help="For paper: a folder with one of each data set; else from the hub."),
    ] = None,
    list_all: Annotated[
        bool, typer.Option("--list", help="List what can be rebuilt, and stop.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Rebuild the paper's exhibits: what it printed, what a run here gives, what is proven of it.

    Figures become a PNG, an SVG and their data. Tables are printed with a verdict. `all` also
    writes one self-contained page. No number is shown that no run produced. Needs a clone.
    """
    from shuffled_dpsgd_experiments.exhibits import SCALES, Request
    from shuffled_dpsgd_experiments.reproductions import REPRODUCTIONS, find

    if list_all:
        titles = {name: each.title for name, each in REPRODUCTIONS.items()}
        if as_json:
            print_json(titles)
        else:
            for name, title in titles.items():
                typer.echo(f"{name:8s} {title}")
        return
    if output.exists() and not output.is_dir():
        raise InvalidArgumentError("--output", expected="a folder", got=str(output))
    is_there = data is None or data.is_dir()
    require(is_there, "--data", "a folder with one of each data set", str(data))
    expected = f"at least one of {', '.join(REPRODUCTIONS)}, or all"
    require(names, "names", expected, [], "`shuffled-dpsgd reproduce --list` describes them")
    if scale not in SCALES:
        raise InvalidArgumentError("--scale", expected=f"one of {SCALES}", got=scale)

    def say(line: str) -> None:
        if not as_json:
            typer.echo(line, err=True)

    whole = names == ["all"]
    request = Request(
        output=output, scale=scale, from_results=from_results, drawings=whole, data=data, say=say
    )
    found = []
    for each in find(names or []):
        if not from_results:
            say(f"{each.name}: {each.title}")
        found.append(each.reproduce(request))
    _show(found, output if whole else None, as_json=as_json)


def _show(found: list[Reproduced], page_in: Path | None, *, as_json: bool) -> None:
    """Print what was found; of everything, one page is written as well."""
    from shuffled_dpsgd_experiments.reproductions import write_page

    pages = [] if page_in is None else [write_page(found, page_in)]
    if as_json:
        print_json(
            {
                each.name: {
                    "title": each.title,
                    "written": [str(path) for path in each.written],
                    "exhibit": None if each.exhibit is None else each.exhibit.to_json(),
                    "missing": each.missing,
                }
                for each in found
            }
        )
        return
    for each in found:
        if each.missing is not None:
            typer.echo(f"{each.name}: {each.missing}")
        if each.exhibit is not None:
            typer.echo(each.exhibit.to_markdown())
        for path in each.written:
            typer.echo(path)
    for path in pages:
        typer.echo(path)


@verb("sweep sweeps/digits.toml", "sweep sweeps/sst2.toml --model MiniLM --data sst2 --table")
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
    table: Annotated[bool, typer.Option("--table", help="Only draw the table.")] = False,
    as_json: AsJson = False,
) -> None:
    """Run what is missing of a sweep and draw its table: mean ± sd over seeds.

    Each cell is one JSON file that is never edited. A sweep that was stopped, or killed, goes on
    where it was; exit status 3 says that cells are missing. A cell that fails is named, with the
    reason, and stepped over; exit status 2 then says so. Commands that share a folder of results
    share the work. Needs a clone.
    """
    from shuffled_dpsgd_experiments.sweeps import load_sweep, run_sweeps, table_of
    from shuffled_dpsgd_experiments.sweeps.running import KnownCells
    from shuffled_dpsgd_experiments.sweeps.table import ordered_rows

    if results is not None and len(files) > 1:
        raise InvalidArgumentError(
            "--results", expected="one sweep: the results of several would mix", got=len(files)
        )
    sweeps = [
        load_sweep(file, model=model, data=data, results=results, budget=budget) for file in files
    ]
    if table:
        complete = all(KnownCells(each).is_complete() for each in sweeps)
    else:
        complete = run_sweeps(
            sweeps,
            stop_after=stop_after,
            on_progress=lambda done: None if as_json else typer.echo(done.describe(), err=True),
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
