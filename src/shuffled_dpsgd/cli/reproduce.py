"""`shuffled-dpsgd reproduce`: rebuild the paper's figures, numbers and drawing, by name."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shuffled_dpsgd.cli.output import AsJson, print_json, reports_errors
from shuffled_dpsgd.errors import InvalidArgumentError

EPILOG = "Example: [bold]shuffled-dpsgd reproduce fig1 fig3 --output figures[/bold]"


@reports_errors
def reproduce(
    names: Annotated[
        list[str] | None, typer.Argument(help="What to rebuild: fig1, fig2, fig3, fig4.")
    ] = None,
    output: Annotated[Path, typer.Option(help="Where PNG, SVG and JSON go.")] = Path("results"),
    list_all: Annotated[
        bool, typer.Option("--list", help="List what can be rebuilt, and stop.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Rebuild figures of the paper: a PNG, an SVG, and the data as JSON for each."""
    from shuffled_dpsgd_experiments.reproductions import REPRODUCTIONS

    if list_all:
        titles = {name: each.title for name, each in REPRODUCTIONS.items()}
        if as_json:
            print_json(titles)
        else:
            for name, title in titles.items():
                typer.echo(f"{name:8s} {title}")
        return
    if not names:
        raise InvalidArgumentError(
            "names",
            expected=f"at least one of {', '.join(REPRODUCTIONS)}",
            got=[],
            remedy="`shuffled-dpsgd reproduce --list` describes them",
        )
    written = _run(names, output, quiet=as_json)
    if as_json:
        print_json(written)
        return
    for paths in written.values():
        for path in paths:
            typer.echo(path)


def _run(names: list[str], output: Path, *, quiet: bool) -> dict[str, list[str]]:
    from rich.console import Console
    from rich.progress import track

    from shuffled_dpsgd_experiments.reproductions import find

    console = Console(stderr=True)
    silent = quiet or not console.is_terminal
    chosen = find(names)
    written = {}
    for each in track(chosen, "reproducing", console=console, transient=True, disable=silent):
        written[each.name] = [str(path) for path in each.reproduce(output)]
    return written
