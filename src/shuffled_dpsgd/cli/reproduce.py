"""`shuffled-dpsgd reproduce`: rebuild the paper's figures and tables, by name."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shuffled_dpsgd.cli.experiments import need_experiments
from shuffled_dpsgd.cli.output import AsJson, print_json, reports_errors
from shuffled_dpsgd.errors import InvalidArgumentError

if TYPE_CHECKING:
    from shuffled_dpsgd_experiments.reproductions import Reproduced

EPILOG = (
    "Examples: [bold]shuffled-dpsgd reproduce fig1 fig3 --output figures[/bold] · "
    "[bold]shuffled-dpsgd reproduce table7[/bold] · "
    "[bold]shuffled-dpsgd reproduce all --from-results[/bold]"
)


@reports_errors
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
            help="demo: minutes on two cores. paper: a GPU, the checkpoints and the data.",
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
    need_experiments("reproduce")
    from shuffled_dpsgd_experiments.reproductions import REPRODUCTIONS, SCALES

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
    if not names:
        raise InvalidArgumentError(
            "names",
            expected=f"at least one of {', '.join(REPRODUCTIONS)}, or all",
            got=[],
            remedy="`shuffled-dpsgd reproduce --list` describes them",
        )
    if scale not in SCALES:
        raise InvalidArgumentError("--scale", expected=f"one of {SCALES}", got=scale)
    found = _run(names, scale, output, data, from_results=from_results, quiet=as_json)
    pages = _write_page(found, output) if names == ["all"] else []
    if as_json:
        print_json({each.name: _plain(each) for each in found})
        return
    for each in found:
        _show(each)
    for path in pages:
        typer.echo(path)


def _run(
    names: list[str],
    scale: Any,
    output: Path,
    data: Path | None,
    *,
    from_results: bool,
    quiet: bool,
) -> list[Reproduced]:
    from shuffled_dpsgd_experiments.reproductions import Request, find

    def say(line: str) -> None:
        if not quiet:
            typer.echo(line, err=True)

    chosen = find(names)
    request = Request(
        output=output,
        scale=scale,
        from_results=from_results,
        drawings=names == ["all"],
        data=data,
        say=say,
    )
    found = []
    for each in chosen:
        if not from_results:
            say(f"{each.name}: {each.title}")
        found.append(each.reproduce(request))
    return found


def _write_page(found: list[Reproduced], output: Path) -> list[Path]:
    from shuffled_dpsgd_experiments.reproduction_page import write_page

    return [write_page(found, output)]


def _plain(each: Reproduced) -> dict[str, Any]:
    return {
        "title": each.title,
        "written": [str(path) for path in each.written],
        "exhibit": None if each.exhibit is None else each.exhibit.to_json(),
        "missing": each.missing,
    }


def _show(each: Reproduced) -> None:
    if each.missing is not None:
        typer.echo(f"{each.name}: {each.missing}")
    if each.exhibit is not None:
        typer.echo(each.exhibit.to_markdown())
    for path in each.written:
        typer.echo(path)
