"""Registers the verbs. Verb modules import nothing heavy at the top, so `--help` is instant."""

from __future__ import annotations

import typer

from shuffled_dpsgd import __version__
from shuffled_dpsgd.cli.account import ACCOUNT_EPILOG, CALIBRATE_EPILOG, account, calibrate
from shuffled_dpsgd.cli.advise import EPILOG as ADVISE_EPILOG
from shuffled_dpsgd.cli.advise import advise
from shuffled_dpsgd.cli.audit import app as audit_app
from shuffled_dpsgd.cli.budget import app as budget_app
from shuffled_dpsgd.cli.examine import EPILOG as EXAMINE_EPILOG
from shuffled_dpsgd.cli.examine import examine
from shuffled_dpsgd.cli.inspect import inspect
from shuffled_dpsgd.cli.output import OneLineGroup
from shuffled_dpsgd.cli.plan import EPILOG as PLAN_EPILOG
from shuffled_dpsgd.cli.plan import plan
from shuffled_dpsgd.cli.reproduce import EPILOG as REPRODUCE_EPILOG
from shuffled_dpsgd.cli.reproduce import reproduce
from shuffled_dpsgd.cli.sweep import EPILOG as SWEEP_EPILOG
from shuffled_dpsgd.cli.sweep import sweep
from shuffled_dpsgd.cli.train import EPILOG as TRAIN_EPILOG
from shuffled_dpsgd.cli.train import train
from shuffled_dpsgd.cli.use import (
    EVALUATE_EPILOG,
    GENERATE_EPILOG,
    PREDICT_EPILOG,
    evaluate,
    generate,
    predict,
)
from shuffled_dpsgd.cli.warm_up import EPILOG as WARM_UP_EPILOG
from shuffled_dpsgd.cli.warm_up import warm_up

EPILOG = (
    "Examples: [bold]shuffled-dpsgd train digits[/bold] · "
    "[bold]shuffled-dpsgd inspect --model gpt2[/bold] · "
    "[bold]shuffled-dpsgd calibrate --epsilon 1 --delta 5e-6 --dataset-size 50000 --batch-size 1000"
    " --epochs 10[/bold] · "
    "[bold]shuffled-dpsgd audit run-folder runs/digits[/bold]"
)

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


app.add_typer(audit_app)
app.add_typer(budget_app)
app.command("calibrate", epilog=CALIBRATE_EPILOG)(calibrate)
app.command("account", epilog=ACCOUNT_EPILOG)(account)
app.command("examine", epilog=EXAMINE_EPILOG)(examine)
app.command("reproduce", epilog=REPRODUCE_EPILOG)(reproduce)
app.command("inspect")(inspect)
app.command("train", epilog=TRAIN_EPILOG)(train)
app.command("sweep", epilog=SWEEP_EPILOG)(sweep)
app.command("advise", epilog=ADVISE_EPILOG)(advise)
app.command("plan", epilog=PLAN_EPILOG)(plan)
app.command("evaluate", epilog=EVALUATE_EPILOG)(evaluate)
app.command("predict", epilog=PREDICT_EPILOG)(predict)
app.command("generate", epilog=GENERATE_EPILOG)(generate)
app.command("warm-up", epilog=WARM_UP_EPILOG)(warm_up)


def main() -> None:
    """Entry point of the `shuffled-dpsgd` command."""
    app()
