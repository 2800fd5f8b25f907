"""`shuffled-dpsgd audit`: what an adversary really learns, held against what is claimed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shuffled_dpsgd.cli.audit_delivery import deliver, progress, read_canary, write_json
from shuffled_dpsgd.cli.output import AsJson, print_json, reports_errors
from shuffled_dpsgd.errors import InvalidArgumentError

app = typer.Typer(
    name="audit",
    help="Attack the mechanism and hold every claimed ε against what the attacks show.",
    no_args_is_help=True,
)

Seed = Annotated[int, typer.Option(help="Seed of every draw; it is written to the JSON.")]
Output = Annotated[
    Path | None, typer.Option(help="Folder for report.json and the curves as PNG and SVG.")
]
ConfigFile = Annotated[Path | None, typer.Option(help="A TOML file as `train --config` reads.")]
STRATEGIES = ("bookkeeping", "ghost", "mixed", "instantiate")
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
    sampling_prob: Annotated[
        float | None, typer.Option(help="With --num-steps: compose the measured μ over a run.")
    ] = None,
    num_steps: Annotated[int | None, typer.Option(help="Steps of that run.")] = None,
    run_delta: Annotated[float, typer.Option(help="δ of that run.")] = 5e-6,
    canary: Annotated[
        Path | None, typer.Option(help="A canary of your own: .npy, one row of --axis-size.")
    ] = None,
    confidence: Confidence = 0.95,
    seed: Seed = 0,
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """Audit one step of the mechanism in isolation: no model, thousands of releases, seconds.

    Exit status 1 means that a proven claim was refuted, which is a bug of this library.

    Example: shuffled-dpsgd audit step --dimension 85800000 --sigma 0.274 --claim 0.198
    """
    from shuffled_dpsgd.auditing.step import RunLength, StepSetting, audit_step, step_claims

    setting = StepSetting(
        noise_multiplier=noise_multiplier,
        dimension=dimension,
        delta=delta,
        batch_clip=batch_clip,
        axis_size=axis_size,
        num_observations=observations,
        seed=seed,
    )
    if (sampling_prob is None) != (num_steps is None):
        raise InvalidArgumentError(
            "--sampling-prob", expected="both of it and --num-steps, or neither", got=sampling_prob
        )
    run_length: RunLength | None = None
    if sampling_prob is not None and num_steps is not None:
        run_length = {"sampling_prob": sampling_prob, "num_steps": num_steps, "delta": run_delta}
    report = audit_step(
        setting,
        step_claims(setting, paper_epsilon=claim),
        confidence=confidence,
        given=None if canary is None else read_canary(canary),
        run=run_length,
    )
    deliver(report, output, as_json)


@app.command()
@reports_errors
def composition(
    noise_multiplier: Annotated[
        float, typer.Option("--sigma", "--noise-multiplier", help="Noise std over clip norm.")
    ],
    sampling_prob: Annotated[float, typer.Option(help="Chance of a record to join a step.")],
    num_steps: Annotated[int, typer.Option(help="Steps of the run.")],
    dimension: Annotated[int, typer.Option(help="Shuffled coordinates d of the paper's formula.")],
    delta: Annotated[float, typer.Option(help="δ of the run.")] = 5e-6,
    batch_clip: Annotated[
        float, typer.Option(help="c'/c; the paper's text implies 1. Always printed.")
    ] = 1.0,
    claim: Annotated[
        float | None,
        typer.Option(help="Heuristic ε of the run to put on trial instead of the formula's."),
    ] = None,
    axis_size: Annotated[int, typer.Option(help="Length of the axis a permutation moves.")] = 3072,
    observations: Annotated[int, typer.Option(help="Runs with, and as many without.")] = 5000,
    confidence: Confidence = 0.95,
    seed: Seed = 0,
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """Audit a whole run of sampled steps in isolation, with the exact likelihood ratio.

    Exit status 1 means that a proven claim was refuted, which is a bug of this library.

    Example: shuffled-dpsgd audit composition --sigma 0.273 --claim 1 --sampling-prob 0.02
    --num-steps 500 --dimension 85800000
    """
    from shuffled_dpsgd.auditing.composition import (
        CompositionSetting,
        audit_composition,
        run_claims,
    )

    setting = CompositionSetting(
        noise_multiplier=noise_multiplier,
        sampling_prob=sampling_prob,
        num_steps=num_steps,
        delta=delta,
        dimension=dimension,
        batch_clip=batch_clip,
        axis_size=axis_size,
        num_observations=observations,
        seed=seed,
    )
    claims = run_claims(setting, paper_epsilon=claim)
    deliver(audit_composition(setting, claims, confidence=confidence), output, as_json)


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


@app.command()
@reports_errors
def run(
    config: ConfigFile = None,
    mode: Annotated[
        str, typer.Option(help="step: one step, many releases. one-run: one run, many canaries.")
    ] = "one-run",
    epsilon: Annotated[
        float | None, typer.Option(help="Calibrate the audited run to this budget instead.")
    ] = None,
    noise_multiplier: Annotated[
        float | None, typer.Option("--sigma", "--noise-multiplier", help="Fix σ instead of ε.")
    ] = None,
    accounting: Annotated[
        str | None, typer.Option(help="certified (proven) or paper (heuristic) calibration.")
    ] = None,
    batch_clip_norm: Annotated[
        float | None, typer.Option(help="c', clip of the shuffled block; paper needs it.")
    ] = None,
    epochs: Annotated[int | None, typer.Option(help="Length of the audited run.")] = None,
    observations: Annotated[int, typer.Option(help="step: releases with, and without.")] = 500,
    canaries: Annotated[int, typer.Option(help="one-run: gradient canaries.")] = 500,
    input_canaries: Annotated[int, typer.Option(help="one-run: canaries that are records.")] = 100,
    input_canary: Annotated[str, typer.Option(help="mislabelled or blank.")] = "mislabelled",
    confidence: Confidence = 0.95,
    seed: Seed = 0,
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """Audit real training: the digits ViT by default, or the task, model and device of a file.

    Exit status 1 means that a proven claim was refuted, which is a bug of this library.

    Example: shuffled-dpsgd audit run --mode one-run --epsilon 1 --epochs 10
    """
    from shuffled_dpsgd.auditing.run import RunSetting, audit_one_run, audit_steps
    from shuffled_dpsgd.cli.audit_target import build_target, chosen_config

    modes = ("step", "one-run")
    if mode not in modes:
        raise InvalidArgumentError("--mode", expected=f"one of {modes}", got=mode)
    chosen = chosen_config(
        config,
        seed=seed,
        epsilon=epsilon,
        noise_multiplier=noise_multiplier,
        accounting=accounting,
        batch_clip_norm=batch_clip_norm,
        epochs=epochs,
    )
    setting = RunSetting(
        num_observations=observations,
        num_gradient_canaries=canaries,
        num_input_canaries=input_canaries,
        input_canary=input_canary,  # type: ignore[arg-type]  # checked by RunSetting
        seed=seed,
    )
    audit = audit_steps if mode == "step" else audit_one_run
    with progress(quiet=as_json) as on_progress:
        report = audit(
            build_target(chosen), setting, confidence=confidence, on_progress=on_progress
        )
    deliver(report, output, as_json)


@app.command()
@reports_errors
def sensitivity(
    config: ConfigFile = None,
    model: Annotated[
        str | None, typer.Option(help="A preset (bert-tiny, gpt2-tiny, …) on random records.")
    ] = None,
    strategy: Annotated[
        list[str] | None, typer.Option(help="Engine strategies to replay; repeat. Default: all.")
    ] = None,
    clip: Annotated[str, typer.Option(help="flat, automatic or per-layer.")] = "flat",
    clip_norm: Annotated[float, typer.Option(help="c, the bound under test.")] = 0.1,
    batch_clip_norm: Annotated[float | None, typer.Option(help="c' of the shuffled block.")] = None,
    records: Annotated[int, typer.Option(help="Records of the batch that is replayed.")] = 8,
    single: Annotated[
        bool, typer.Option("--single", help="Keep float32 instead of float64.")
    ] = False,
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """Replay a step on neighbouring batches, noise off: does any record move it beyond c?

    Exit status 1 if any check fails.

    Example: shuffled-dpsgd audit sensitivity --model gpt2-tiny --strategy bookkeeping
    """
    from shuffled_dpsgd.cli.audit_tables import show_checks
    from shuffled_dpsgd.cli.audit_target import replay_target

    reports = replay_target(
        config,
        model=model,
        strategies=tuple(strategy or STRATEGIES),
        clip=clip,
        clip_norm=clip_norm,
        batch_clip_norm=batch_clip_norm,
        num_records=records,
        double=not single,
    )
    found = {"reports": [report.to_json() for report in reports]}
    if output is not None:
        write_json(found, output)
    if as_json:
        print_json(found)
    else:
        show_checks(reports)
    if not all(report.passed for report in reports):
        raise typer.Exit(1)
