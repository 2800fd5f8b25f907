"""The options of the audit verbs, each declared once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

NOISE = ("--sigma", "--noise-multiplier")

Dimension = Annotated[int, typer.Option(help="Shuffled coordinates d of the paper's formula.")]
Sigma = Annotated[float, typer.Option(*NOISE, help="Noise std over clip norm.")]
Delta = Annotated[float, typer.Option(help="δ of what is audited.")]
BatchClip = Annotated[float, typer.Option(help="c'/c; the paper's text implies 1. Always printed.")]
Claim = Annotated[
    float | None, typer.Option(help="Heuristic ε to put on trial instead of the formula's.")
]
AxisSize = Annotated[int, typer.Option(help="Length of the axis a permutation moves.")]
Observations = Annotated[int, typer.Option(help="Releases with the canary, and as many without.")]
SamplingProb = Annotated[float, typer.Option(help="Chance of a record to join a step.")]
NumSteps = Annotated[int, typer.Option(help="Steps of the run.")]
ComposeProb = Annotated[
    float | None, typer.Option(help="With --num-steps: compose the measured μ over a run.")
]
ComposeSteps = Annotated[int | None, typer.Option(help="Steps of that run.")]
ComposeDelta = Annotated[float, typer.Option(help="δ of that run.")]
Confidence = Annotated[float, typer.Option(help="Level of every bound, and of the verdicts.")]
Seed = Annotated[int, typer.Option(help="Seed of every draw; it is written to the JSON.")]
Output = Annotated[
    Path | None, typer.Option(help="Folder for report.json and the curves as PNG and SVG.")
]

Seeds = Annotated[int, typer.Option(help="Runs of each kind.")]
BlackBoxSteps = Annotated[int | None, typer.Option(help="Steps of every run.")]

RunFolder = Annotated[Path, typer.Argument(metavar="DIR", help="The folder of a finished run.")]
ConfigFile = Annotated[Path | None, typer.Option(help="A TOML file as `train --config` reads.")]
Mode = Annotated[
    str, typer.Option(help="step: one step, many releases. one-run: one run, many canaries.")
]
OtherRecords = Annotated[
    bool,
    typer.Option(help="one-run: without them canaries take part alone, the worst data set."),
]
GradientCanaries = Annotated[int, typer.Option(help="one-run: gradient canaries.")]
InputCanaries = Annotated[
    int, typer.Option(help="Records as canaries: so many in one-run, one in a step unless 0.")
]
FolderCanaries = Annotated[
    int | None,
    typer.Option(help="Records as canaries: 100, or none where the run counts in a budget."),
]
InputCanary = Annotated[
    str,
    typer.Option(help="mislabelled or blank; for language models scrambled or new-token."),
]

Model = Annotated[
    str | None,
    typer.Option(help="As `inspect` takes it; with random weights, on random records."),
]
ClipNorm = Annotated[float, typer.Option(help="c, the bound under test.")]
NumRecords = Annotated[int, typer.Option(help="Records of the batch that is replayed.")]
Single = Annotated[bool, typer.Option("--single", help="Keep float32 instead of float64.")]
