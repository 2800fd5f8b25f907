"""The verbs of `shuffled-dpsgd audit` that are there in a clone alone."""

from __future__ import annotations

from typing import Annotated

import typer

from shuffled_dpsgd.cli import audit_options as opt
from shuffled_dpsgd.cli import privacy_options as privacy
from shuffled_dpsgd.cli.audit_output import deliver, hand_over, progress
from shuffled_dpsgd.cli.audit_target import chosen_config
from shuffled_dpsgd.cli.output import AsJson, reports_errors
from shuffled_dpsgd.errors import require

Dimension = Annotated[int, typer.Option(help="Shuffled coordinates d of the paper's formula.")]
Sigma = Annotated[
    float, typer.Option("--sigma", "--noise-multiplier", help="Noise std over clip norm.")
]
Delta = Annotated[float, typer.Option(help="δ of what is audited.")]
BatchClip = Annotated[float, typer.Option(help="c'/c; the paper's text implies 1. Always printed.")]
Claim = Annotated[
    float | None, typer.Option(help="Heuristic ε to put on trial instead of the formula's.")
]
AxisSize = Annotated[int, typer.Option(help="Length of the axis a permutation moves.")]
SamplingProb = Annotated[float, typer.Option(help="Chance of a record to join a step.")]
NumSteps = Annotated[int, typer.Option(help="Steps of the run.")]
ComposeProb = Annotated[
    float | None, typer.Option(help="With --num-steps: compose the measured μ over a run.")
]
ComposeSteps = Annotated[int | None, typer.Option(help="Steps of that run.")]
ComposeDelta = Annotated[float, typer.Option(help="δ of that run.")]
Seeds = Annotated[int, typer.Option(help="Runs of each kind.")]
BlackBoxSteps = Annotated[int | None, typer.Option(help="Steps of every run.")]


@reports_errors
def step(
    dimension: Dimension,
    noise_multiplier: Sigma,
    delta: Delta = 2.5e-7,
    batch_clip: BatchClip = 1.0,
    claim: Claim = None,
    axis_size: AxisSize = 3072,
    observations: opt.Observations = 5000,
    sampling_prob: ComposeProb = None,
    num_steps: ComposeSteps = None,
    run_delta: ComposeDelta = 5e-6,
    confidence: opt.Confidence = 0.95,
    seed: opt.Seed = 0,
    output: opt.Output = None,
    as_json: AsJson = False,
) -> None:
    """Audit one step of the mechanism in isolation: no model, thousands of releases, seconds.

    Needs a clone.

    Example: shuffled-dpsgd audit step --dimension 85800000 --sigma 0.274 --claim 0.198
    """
    from shuffled_dpsgd_experiments.audits.step import StepSetting, audit_step, step_claims

    setting = StepSetting(
        noise_multiplier=noise_multiplier,
        dimension=dimension,
        delta=delta,
        batch_clip=batch_clip,
        axis_size=axis_size,
        num_observations=observations,
        seed=seed,
    )
    expected = "both of it and --num-steps, or neither"
    both = (sampling_prob is None) == (num_steps is None)
    require(both, "--sampling-prob", expected, sampling_prob)
    run = {"sampling_prob": sampling_prob, "num_steps": num_steps, "delta": run_delta}
    claims = step_claims(setting, paper_epsilon=claim)
    report = audit_step(
        setting, claims, confidence=confidence, run=None if num_steps is None else run
    )
    deliver(report, output, as_json)


@reports_errors
def composition(
    noise_multiplier: Sigma,
    sampling_prob: SamplingProb,
    num_steps: NumSteps,
    dimension: Dimension,
    delta: Delta = 5e-6,
    batch_clip: BatchClip = 1.0,
    claim: Claim = None,
    axis_size: AxisSize = 3072,
    observations: opt.Observations = 5000,
    confidence: opt.Confidence = 0.95,
    seed: opt.Seed = 0,
    output: opt.Output = None,
    as_json: AsJson = False,
) -> None:
    """Audit a whole run of sampled steps in isolation, with the exact likelihood ratio.

    Needs a clone.

    Example: shuffled-dpsgd audit composition --sigma 0.273 --claim 1 --sampling-prob 0.02
    --num-steps 500 --dimension 85800000
    """
    from shuffled_dpsgd_experiments.audits import composition as audited

    setting = audited.CompositionSetting(
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
    claims = audited.run_claims(setting, paper_epsilon=claim)
    deliver(audited.audit_composition(setting, claims, confidence=confidence), output, as_json)


@reports_errors
def blackbox(
    config: opt.ConfigFile = None,
    seeds: Seeds = 12,
    canaries: opt.InputCanaries = 100,
    input_canary: opt.InputCanary = "mislabelled",
    noise_multiplier: privacy.NoiseMultiplier = None,
    training_steps: BlackBoxSteps = None,
    confidence: opt.Confidence = 0.95,
    seed: opt.Seed = 0,
    output: opt.Output = None,
    as_json: AsJson = False,
) -> None:
    """The knock-out: the same membership attack with the shuffle and without, many seeds.

    Beside them, the same training without privacy. The digits ViT by default, with noise 0.1 and 60
    steps, or the task and model of a file. Needs a clone.

    Example: shuffled-dpsgd audit blackbox --output black-box
    """
    from shuffled_dpsgd_experiments.audits import targets
    from shuffled_dpsgd_experiments.audits.black_box import BlackBoxSetting, audit_black_box
    from shuffled_dpsgd_experiments.audits.shown import save_black_box, show_black_box

    setting = BlackBoxSetting(
        num_seeds=seeds,
        num_canaries=canaries,
        input_canary=input_canary,  # type: ignore[arg-type]  # checked by the setting
        seed=seed,
    )
    chosen = None
    if config is not None:
        chosen = chosen_config(
            config,
            seed=seed,
            privacy={"noise_multiplier": noise_multiplier},
            training={"num_steps": training_steps},
        )
    start, target = targets.black_box_target(
        chosen, noise_multiplier=noise_multiplier, num_steps=training_steps
    )
    with progress(quiet=as_json) as on_progress:
        report = audit_black_box(
            start, target, setting, confidence=confidence, on_progress=on_progress
        )
    if output is not None:
        save_black_box(report, output / "black-box")
    hand_over(report.to_json(), output, as_json, lambda: show_black_box(report))
