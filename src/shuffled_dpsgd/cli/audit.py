"""`shuffled-dpsgd audit`: what an adversary really learns, held against what is claimed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shuffled_dpsgd.cli.output import AsJson, json_text, print_json, reports_errors

if TYPE_CHECKING:
    from shuffled_dpsgd.auditing.verdict import AuditReport

app = typer.Typer(
    name="audit",
    help="Attack the mechanism and hold every claimed ε against what the attacks show.",
    no_args_is_help=True,
)

Seed = Annotated[int, typer.Option(help="Seed of every draw; it is written to the JSON.")]
Output = Annotated[
    Path | None, typer.Option(help="Folder for report.json and the curves as PNG and SVG.")
]
Confidence = Annotated[float, typer.Option(help="Level of every bound, and of the verdicts.")]


@app.command()
@reports_errors
def step(
    dimension: Annotated[int, typer.Option(help="Shuffled coordinates d of the paper's formula.")],
    noise_multiplier: Annotated[
        float, typer.Option("--sigma", "--noise-multiplier", help="Noise std over clip norm.")
    ],
    delta: Annotated[float, typer.Option(help="δ of one step.")] = 2.5e-7,
    batch_clip: Annotated[
        float, typer.Option(help="c'/c; the paper's text implies 1. Always printed.")
    ] = 1.0,
    claim: Annotated[
        float | None,
        typer.Option(help="Heuristic ε of one step to put on trial instead of the formula's."),
    ] = None,
    axis_size: Annotated[int, typer.Option(help="Length of the axis a permutation moves.")] = 3072,
    observations: Annotated[int, typer.Option(help="Releases with, and as many without.")] = 5000,
    confidence: Confidence = 0.95,
    seed: Seed = 0,
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """Audit one step of the mechanism in isolation: no model, thousands of releases, seconds.

    Exit status 1 means that a proven claim was refuted, which is a bug of this library.

    Example: shuffled-dpsgd audit step --dimension 85800000 --sigma 0.274 --claim 0.198
    """
    from shuffled_dpsgd.auditing.step import StepSetting, audit_step, step_claims

    setting = StepSetting(
        noise_multiplier=noise_multiplier,
        dimension=dimension,
        delta=delta,
        batch_clip=batch_clip,
        axis_size=axis_size,
        num_observations=observations,
        seed=seed,
    )
    claims = step_claims(setting, paper_epsilon=claim)
    deliver(audit_step(setting, claims, confidence=confidence), output, as_json)


@app.command()
@reports_errors
def paper(
    epsilon: Annotated[
        list[float] | None, typer.Option(help="Claims of the run; repeat. Table 6 has 0.5 and 1.")
    ] = None,
    batch_clip: Annotated[float, typer.Option(help="c'/c; the paper's text implies 1.")] = 1.0,
    observations: Annotated[int, typer.Option(help="Steps with, and as many without.")] = 5000,
    repetitions: Annotated[
        int, typer.Option(help="Repeats that show the estimator's spread.")
    ] = 200,
    seed: Seed = 0,
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """Repeat the paper's Table 6, and show what its estimator prints on pure noise.

    Example: shuffled-dpsgd audit paper --epsilon 0.5 --epsilon 1
    """
    from dataclasses import asdict

    from shuffled_dpsgd.auditing.paper_audit import PaperSetting, paper_audit
    from shuffled_dpsgd.cli.audit_tables import show_paper

    setting = PaperSetting(
        batch_clip=batch_clip, num_observations=observations, repetitions=repetitions, seed=seed
    )
    rows = paper_audit(setting, tuple(epsilon or (0.5, 1.0)))
    found = {"setting": asdict(setting), "rows": [row.to_json() for row in rows]}
    if output is not None:
        write_json(found, output)
    if as_json:
        print_json(found)
    else:
        show_paper(rows, setting)


def deliver(report: AuditReport, output: Path | None, as_json: bool) -> None:
    """Print, write, and exit with status 1 if a proven claim was refuted."""
    from shuffled_dpsgd.cli.audit_tables import show_report

    if output is not None:
        from shuffled_dpsgd.auditing.plots import save

        write_json(report.to_json(), output)
        save(report, output / "curves")
    if as_json:
        print_json(report.to_json())
    else:
        show_report(report)
    if report.refutes_a_proven_claim:
        typer.secho("a proven claim is refuted: please report this as a bug", fg="red", err=True)
        raise typer.Exit(1)


def write_json(value: object, folder: Path) -> None:
    """`report.json` in `folder`, as `--json` would print it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.json").write_text(json_text(value), encoding="utf-8")
