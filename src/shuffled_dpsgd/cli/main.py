"""Registers the verbs. Their modules import nothing slow at the top, so that `--help` is fast."""

from __future__ import annotations

import typer

from shuffled_dpsgd import __version__
from shuffled_dpsgd.cli import audit, budget
from shuffled_dpsgd.cli.account import account, calibrate
from shuffled_dpsgd.cli.advise import advise
from shuffled_dpsgd.cli.card import card, verify
from shuffled_dpsgd.cli.experiments import VERBS, register
from shuffled_dpsgd.cli.inspect import inspect
from shuffled_dpsgd.cli.output import EXAMPLES, OneLineGroup, shown_examples
from shuffled_dpsgd.cli.plan import plan
from shuffled_dpsgd.cli.train import train
from shuffled_dpsgd.cli.use import evaluate, generate, predict, report
from shuffled_dpsgd.cli.warm_up import warm_up

PANELS = {
    "Train": (train, advise, inspect, plan, warm_up),
    "Use a run": (evaluate, predict, generate, report, card, verify),
    "What ε costs and means": (calibrate, account),
}

app = typer.Typer(
    name="shuffled-dpsgd",
    epilog=shown_examples(
        "train digits",
        "inspect --model gpt2",
        "calibrate --epsilon 1 --delta 5e-6 --dataset-size 50000 --batch-size 1000 --epochs 10",
        "audit run-folder runs/digits",
    ),
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


for panel, verbs in PANELS.items():
    for verb in verbs:
        name = verb.__name__
        app.command(name.replace("_", "-"), epilog=EXAMPLES[name], rich_help_panel=panel)(verb)
app.add_typer(audit.app, rich_help_panel="What ε costs and means")
app.add_typer(budget.app, rich_help_panel="What ε costs and means")
register(app, VERBS, rich_help_panel="The paper's experiments")


def main() -> None:
    """Entry point of the `shuffled-dpsgd` command."""
    app()
