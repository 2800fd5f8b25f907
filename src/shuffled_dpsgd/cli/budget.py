"""`shuffled-dpsgd budget`: one file for all that is done to the same data, and what it has cost."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shuffled_dpsgd.cli.accounting import AdjacencyOption, Delta, number
from shuffled_dpsgd.cli.output import AsJson, print_json, reports_errors, table

if TYPE_CHECKING:
    from shuffled_dpsgd.training.budget import Account

EPILOG = (
    "Examples: [bold]shuffled-dpsgd budget new patients.json --epsilon 3 --delta 1e-6[/bold] · "
    "[bold]shuffled-dpsgd train --config run.toml --budget patients.json[/bold] · "
    "[bold]shuffled-dpsgd budget show patients.json --json[/bold]"
)
app = typer.Typer(
    name="budget",
    epilog=EPILOG,
    help="Count every run on the same records in one file, and refuse one too many.",
    no_args_is_help=True,
)
File = Annotated[Path, typer.Argument(metavar="FILE", help="The budget's file.")]


@app.command()
@reports_errors
def new(
    file: File,
    delta: Delta,
    epsilon: Annotated[
        float | None, typer.Option(help="Refuse what would cost more than this. None: only count.")
    ] = None,
    adjacency: AdjacencyOption = "add-remove",
    adaptive: Annotated[
        bool,
        typer.Option("--adaptive", help="Runs may be chosen by what others released. Costs more."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Make a budget for the records of the first run that names it. An old one stays as it is.

    Example: shuffled-dpsgd budget new patients.json --epsilon 3 --delta 1e-6
    """
    from shuffled_dpsgd.training.budget import BudgetFile

    made = BudgetFile(file).create(
        delta=delta, epsilon=epsilon, adjacency=adjacency, adaptive=adaptive
    )
    _print(file, made, as_json)


@app.command()
@reports_errors
def show(file: File, as_json: AsJson = False) -> None:
    """What all runs cost, each alone and all together, and what is left.

    Example: shuffled-dpsgd budget show patients.json
    """
    from shuffled_dpsgd.training.budget import BudgetFile

    _print(file, BudgetFile(file).read(), as_json)


@app.command()
@reports_errors
def admit(
    file: File,
    mark: Annotated[str, typer.Argument(metavar="MARK", help="As the refusal of a run named it.")],
    as_json: AsJson = False,
) -> None:
    """Say that data of another mark are the same records, prepared in another way.

    Example: shuffled-dpsgd budget admit patients.json 5f0c2a9e1b7d4c3388aa10f2
    """
    from shuffled_dpsgd.training.budget import BudgetFile

    _print(file, BudgetFile(file).admit(mark), as_json)


def _print(file: Path, account: Account, as_json: bool) -> None:
    found = _described(account)
    if as_json:
        print_json({"file": str(file), **found})
        return
    from rich.console import Console

    headings = ("begun", "run", "σ, q, T", "ε alone (proven)", "how it ended")
    rows = [
        (
            run.began[:16].replace("T", " "),
            f"{'' if run.best_of is None else f'best of Poisson({run.best_of:g}): '}{run.name}",
            f"{run.noise_multiplier:.4g}, {run.sampling_prob:.4g}, {run.num_steps}",
            number(row["epsilon"]),
            run.ending,
        )
        for run, row in zip(account.runs, found["runs"], strict=True)
    ]
    console = Console()
    if rows:
        title = f"δ = {account.delta:g}, {account.adjacency}"
        console.print(table(headings, rows, words=headings, title=title, title_justify="left"))
    for line in _totals(account, found):
        console.print(line, highlight=False)


def _described(account: Account) -> dict[str, Any]:
    from shuffled_dpsgd.accounting import claim_together

    spent, delta, limit = account.spent, account.delta, account.epsilon
    together = again = share = None
    if spent:
        together = account.together().to_json()
        if account.filter is None:
            again = claim_together([*spent, spent[-1]], delta).epsilon
        else:
            share = account.filter.share(spent)
    alone = [claim_together([each], delta).epsilon for each in spent]
    left = None
    if limit is not None and not account.adaptive:
        left = limit - (together["epsilon"] if together else 0.0)
    return {
        "delta": delta,
        "adjacency": account.adjacency,
        "limit": limit,
        "adaptive": account.adaptive,
        "together": together,
        "left": left,
        "share_used": share,
        "with_another_like_the_last": again,
        "runs": [
            {**asdict(run), "epsilon": epsilon, "kind": "proven", "ending": run.ending}
            for run, epsilon in zip(account.runs, alone, strict=True)
        ],
    }


def _totals(account: Account, found: dict[str, Any]) -> list[str]:
    limit = "no limit" if account.epsilon is None else f"limit ε = {account.epsilon:g}"
    if found["together"] is None:
        return [f"Nothing is spent yet; {limit} at δ = {account.delta:g}."]
    together, count = found["together"], len(account.runs)
    total = (
        f"{count} run{'s' if count > 1 else ''} together: ε = {number(together['epsilon'])} "
        f"(proven) at δ = {account.delta:g} by {together['method']}"
    )
    if found["share_used"] is not None:
        return [f"{total}, whatever they were chosen by; {found['share_used']:.1%} of it is used."]
    settled = ", if neither their number nor their settings were chosen by what they released"
    left = "" if found["left"] is None else f", {number(found['left'])} of it left"
    again = number(found["with_another_like_the_last"])
    return [
        f"{total}{settled if count > 1 else ''}.",
        f"{limit}{left}; another run like the last would make it {again}.".capitalize(),
    ]
