"""The options of the audit verbs, each declared once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Observations = Annotated[int, typer.Option(help="Releases with the canary, and as many without.")]
Confidence = Annotated[float, typer.Option(help="Level of every bound, and of the verdicts.")]
Seed = Annotated[int, typer.Option(help="Seed of every draw; it is written to the JSON.")]
Output = Annotated[
    Path | None, typer.Option(help="Folder for report.json and the curves as PNG and SVG.")
]

RunFolder = Annotated[Path, typer.Argument(metavar="DIR", help="The folder of a finished run.")]
ConfigFile = Annotated[Path | None, typer.Option(help="A TOML file as `train --config` reads.")]
Mode = Annotated[
    str, typer.Option(help="step: one step, many releases. one-run: one run, many canaries.")
]
OtherRecords = Annotated[
    bool, typer.Option(help="one-run: without them canaries take part alone, the worst data set.")
]
GradientCanaries = Annotated[int, typer.Option(help="one-run: gradient canaries.")]
InputCanaries = Annotated[
    int, typer.Option(help="Records as canaries: so many in one-run, one in a step unless 0.")
]
FolderCanaries = Annotated[
    int | None,
    typer.Option(help="Records as canaries: 100; none where a run draws units or has a budget."),
]
InputCanary = Annotated[
    str, typer.Option(help="mislabelled or blank; for language models scrambled or new-token.")
]

Model = Annotated[
    str | None, typer.Option(help="As `inspect` takes it; with random weights, on random records.")
]
ClipNorm = Annotated[float, typer.Option(help="c, the bound under test.")]
NumRecords = Annotated[int, typer.Option(help="Records of the batch that is replayed.")]
Single = Annotated[bool, typer.Option("--single", help="Keep float32 instead of float64.")]
