"""`shuffled-dpsgd card`: a run's card for whoever publishes the model."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from shuffled_dpsgd.cli.output import AsJson, print_json, reports_errors

EPILOG = (
    "Examples: [bold]shuffled-dpsgd card runs/digits --format registry[/bold] · "
    "[bold]shuffled-dpsgd card privacy_card.json --format markdown --output README.md[/bold]"
)


class Format(StrEnum):
    """What a card is written as."""

    registry = "registry"
    nist = "nist"
    markdown = "markdown"
    json = "json"
    html = "html"


@reports_errors
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

    Only the certified claim enters the first three. The ε is computed again from what the card says
    of noise and steps; a card that was changed by hand is refused.
    """
    from shuffled_dpsgd.errors import InvalidArgumentError
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
        if output.exists():
            raise InvalidArgumentError(
                "--output", expected="a file that is not there yet", got=str(output)
            )
        output.write_text(written, encoding="utf-8")
    if as_json:
        print_json({"format": format.value, "output": output and str(output), "text": written})
    elif output is None:
        typer.echo(written, nl=False)
    else:
        typer.echo(f"{output}: the card as {format.value}")
