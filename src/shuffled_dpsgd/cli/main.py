"""Registers the verbs. Their modules import nothing slow at the top, so that `--help` is fast."""

from __future__ import annotations

from types import ModuleType

import typer

from shuffled_dpsgd import __version__
from shuffled_dpsgd.cli import (
    account,
    advise,
    audit,
    budget,
    card,
    examine,
    inspect,
    plan,
    train,
    use,
    verify,
    warm_up,
)
from shuffled_dpsgd.cli.experiments import register_verbs
from shuffled_dpsgd.cli.output import OneLineGroup

EPILOG = (
    "Examples: [bold]shuffled-dpsgd train digits[/bold] · "
    "[bold]shuffled-dpsgd inspect --model gpt2[/bold] · "
    "[bold]shuffled-dpsgd calibrate --epsilon 1 --delta 5e-6 --dataset-size 50000 --batch-size 1000"
    " --epochs 10[/bold] · "
    "[bold]shuffled-dpsgd audit run-folder runs/digits[/bold]"
)
VERBS: tuple[ModuleType, ...] = (*(examine, inspect, train, advise, card, plan, verify, warm_up),)

app = typer.Typer(
    name="shuffled-dpsgd",
    epilog=EPILOG,
    cls=OneLineGroup,
    help="Differentially private training of Transformers, with weight shuffling.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def options(
    version: bool = typer.Option(
        False, "--version", help="Print the version.", callback=_version, is_eager=True
    ),
) -> None:
    """Differentially private training of Transformers, with weight shuffling."""


app.add_typer(audit.app)
app.add_typer(budget.app)
for module in VERBS:
    name = module.__name__.rpartition(".")[2]
    app.command(name.replace("_", "-"), epilog=module.EPILOG)(getattr(module, name))
for module in (account, use):
    for name, epilog in module.EPILOGS.items():
        app.command(name, epilog=epilog)(getattr(module, name))
register_verbs(app)


def main() -> None:
    """Entry point of the `shuffled-dpsgd` command."""
    app()
