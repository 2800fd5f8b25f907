"""`shuffled-dpsgd verify`: whether saved weights are those of a privacy card."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from shuffled_dpsgd.cli.output import AsJson, print_json, reports_errors
from shuffled_dpsgd.errors import InvalidArgumentError

EPILOG = (
    "Example: [bold]shuffled-dpsgd verify runs/digits/privacy_card.json runs/digits/model[/bold]"
)


@reports_errors
def verify(
    card: Annotated[Path, typer.Argument(help="The card as JSON.")],
    saved: Annotated[Path, typer.Argument(help="A folder or a file of weights.")],
    as_json: AsJson = False,
) -> None:
    """Compare saved weights with those that were released, tensor by tensor.

    Weights that were trained on afterwards without privacy have no claim, whatever lies beside
    them. Names and formats do not matter; a copy in another type is not the same.
    """
    from shuffled_dpsgd.training import compare_weights

    try:
        known = json.loads(card.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InvalidArgumentError("card", expected="a card as JSON", got=str(card)) from error
    compare_weights(known, saved)
    count = len(known["weights"]["trained"])
    if as_json:
        print_json({"card": str(card), "saved": str(saved), "trained_tensors": count})
    else:
        typer.echo(f"{saved}: the {count} trained tensors are those that the card is about")
