"""`card` and `verify`: a run's card for publishing, and whether saved weights are its own."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from shuffled_dpsgd.cli.output import AsJson, print_json, verb
from shuffled_dpsgd.errors import InvalidArgumentError, require


class Format(StrEnum):
    """What a card is written as."""

    registry = "registry"
    nist = "nist"
    markdown = "markdown"
    json = "json"
    html = "html"


@verb(
    "card runs/digits --format registry",
    "card privacy_card.json --format markdown --output README.md",
)
def card(
    run: Annotated[
        Path, typer.Argument(help="The folder of a run or of a Trainer, or a card as JSON.")
    ],
    format: Annotated[
        Format,
        typer.Option(
            help="A record for the Differential Privacy Deployments Registry, a checklist after "
            "NIST SP 800-226, a hub's model card, or the whole card."
        ),
    ] = Format.markdown,
    output: Annotated[Path | None, typer.Option(help="Write to this file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Write the privacy card of a run for a registry, an auditor or a model hub.

    Only the certified claim enters the first three. What follows from the card's plan is computed
    again and compared; a folder's card is compared with its ledger too.
    """
    from shuffled_dpsgd.reports import card_page, publishing
    from shuffled_dpsgd.training.saved_card import read_card

    found = read_card(run)
    written = {
        Format.registry: publishing.registry_yaml,
        Format.nist: publishing.nist_checklist,
        Format.markdown: publishing.model_card,
        Format.json: lambda known: known.dumps() + "\n",
        Format.html: card_page,
    }[format](found)
    if output is not None:
        require(not output.exists(), "--output", "a file that is not there yet", str(output))
        output.write_text(written, encoding="utf-8")
    if as_json:
        print_json({"format": format.value, "output": output and str(output), "text": written})
    elif output is None:
        typer.echo(written, nl=False)
    else:
        typer.echo(f"{output}: the card as {format.value}")


@verb("verify runs/digits/privacy_card.json runs/digits/model")
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
