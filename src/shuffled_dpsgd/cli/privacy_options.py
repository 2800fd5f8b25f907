"""The options of a private run on the command line, with the help of `PrivacyOptions`.

Those that are choices are taken as text and checked with all the others, so that a wrong one is
refused in the same words whether it comes from a file or from a flag.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from shuffled_dpsgd.options import choices_of, help_of


def stated(name: str, *flags: str) -> Any:
    """The typer option of a privacy option; `flags` where they are not its name."""
    metavar = "|".join(choices_of(name)) or None
    return typer.Option(*flags, help=help_of(name), metavar=metavar)


Epsilon = Annotated[float | None, stated("epsilon")]
NoiseMultiplier = Annotated[
    float | None, stated("noise_multiplier", "--sigma", "--noise-multiplier")
]
Delta = Annotated[float | None, stated("delta")]
Method = Annotated[str | None, stated("method")]
Accounting = Annotated[str | None, stated("accounting")]
ClipNorm = Annotated[float | None, stated("clip_norm")]
BatchClipNorm = Annotated[float | None, stated("batch_clip_norm")]
Shuffle = Annotated[str | None, stated("shuffle")]
Scope = Annotated[str | None, stated("scope")]
NoiseFrame = Annotated[str | None, stated("noise_frame")]
Epochs = Annotated[int | None, stated("epochs")]
BatchSize = Annotated[int | None, stated("expected_batch_size", "--batch-size")]
BudgetFile = Annotated[Path | None, stated("budget", "--budget")]
Seed = Annotated[int | None, stated("seed")]
Clip = Annotated[str, stated("clip")]
Strategies = Annotated[
    list[str] | None,
    typer.Option(
        help="Engine strategies to replay; repeat. Default: all.",
        metavar="|".join(choices_of("strategy")),
    ),
]
