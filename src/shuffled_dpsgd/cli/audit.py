"""`shuffled-dpsgd audit`: what an adversary really learns, held against what is claimed."""

from __future__ import annotations

import secrets
from dataclasses import replace

import typer

from shuffled_dpsgd.cli import audit_options as opt
from shuffled_dpsgd.cli import privacy_options as privacy
from shuffled_dpsgd.cli.audit_output import (
    deliver,
    hand_over,
    progress,
    show_checks,
)
from shuffled_dpsgd.cli.audit_target import chosen_config, replay_target
from shuffled_dpsgd.cli.experiments import need_experiments
from shuffled_dpsgd.cli.output import AsJson, reports_errors
from shuffled_dpsgd.errors import InvalidArgumentError, require
from shuffled_dpsgd.options import choices_of

EPILOG = (
    "Examples: [bold]shuffled-dpsgd audit step --dimension 85800000 --sigma 0.274 --claim 0.198"
    "[/bold] · "
    "[bold]shuffled-dpsgd audit run --mode one-run --epsilon 1 --epochs 10[/bold] · "
    "[bold]shuffled-dpsgd audit run-folder runs/digits[/bold]"
)

app = typer.Typer(
    name="audit",
    epilog=EPILOG,
    help="Attack the mechanism and hold every claimed ε against what the attacks show. "
    "Exit status 1: a proven claim was refuted, or a replay check failed.",
    no_args_is_help=True,
)
MODES = ("step", "one-run")


@app.command()
@reports_errors
def step(
    dimension: opt.Dimension,
    noise_multiplier: opt.Sigma,
    delta: opt.Delta = 2.5e-7,
    batch_clip: opt.BatchClip = 1.0,
    claim: opt.Claim = None,
    axis_size: opt.AxisSize = 3072,
    observations: opt.Observations = 5000,
    sampling_prob: opt.ComposeProb = None,
    num_steps: opt.ComposeSteps = None,
    run_delta: opt.ComposeDelta = 5e-6,
    confidence: opt.Confidence = 0.95,
    seed: opt.Seed = 0,
    output: opt.Output = None,
    as_json: AsJson = False,
) -> None:
    """Audit one step of the mechanism in isolation: no model, thousands of releases, seconds.

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
    expected = "both of it and --num-steps, or neither"
    both = (sampling_prob is None) == (num_steps is None)
    require(both, "--sampling-prob", expected, sampling_prob)
    run = {"sampling_prob": sampling_prob, "num_steps": num_steps, "delta": run_delta}
    claims = step_claims(setting, paper_epsilon=claim)
    report = audit_step(
        setting, claims, confidence=confidence, run=None if num_steps is None else run
    )
    deliver(report, output, as_json)


@app.command()
@reports_errors
def composition(
    noise_multiplier: opt.Sigma,
    sampling_prob: opt.SamplingProb,
    num_steps: opt.NumSteps,
    dimension: opt.Dimension,
    delta: opt.Delta = 5e-6,
    batch_clip: opt.BatchClip = 1.0,
    claim: opt.Claim = None,
    axis_size: opt.AxisSize = 3072,
    observations: opt.Observations = 5000,
    confidence: opt.Confidence = 0.95,
    seed: opt.Seed = 0,
    output: opt.Output = None,
    as_json: AsJson = False,
) -> None:
    """Audit a whole run of sampled steps in isolation, with the exact likelihood ratio.

    Example: shuffled-dpsgd audit composition --sigma 0.273 --claim 1 --sampling-prob 0.02
    --num-steps 500 --dimension 85800000
    """
    from shuffled_dpsgd.auditing import composition as audited

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


@app.command()
@reports_errors
def blackbox(
    config: opt.ConfigFile = None,
    seeds: opt.Seeds = 12,
    canaries: opt.InputCanaries = 100,
    input_canary: opt.InputCanary = "mislabelled",
    noise_multiplier: privacy.NoiseMultiplier = None,
    training_steps: opt.BlackBoxSteps = None,
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
    need_experiments("audit blackbox")
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


@app.command()
@reports_errors
def run(
    config: opt.ConfigFile = None,
    mode: opt.Mode = "one-run",
    epsilon: privacy.Epsilon = None,
    noise_multiplier: privacy.NoiseMultiplier = None,
    accounting: privacy.Accounting = None,
    batch_clip_norm: privacy.BatchClipNorm = None,
    epochs: privacy.Epochs = None,
    budget: privacy.BudgetFile = None,
    observations: opt.Observations = 500,
    canaries: opt.GradientCanaries = 500,
    input_canaries: opt.InputCanaries = 100,
    input_canary: opt.InputCanary = "mislabelled",
    other_records: opt.OtherRecords = True,
    confidence: opt.Confidence = 0.95,
    seed: opt.Seed = 0,
    output: opt.Output = None,
    as_json: AsJson = False,
) -> None:
    """Audit real training: the digits ViT by default, or the task, model and device of a file.

    Example: shuffled-dpsgd audit run --mode one-run --epsilon 1 --epochs 10
    """
    from shuffled_dpsgd.auditing.estimators.scores import check_levels
    from shuffled_dpsgd.auditing.run import audit_one_run, audit_steps
    from shuffled_dpsgd.auditing.target import RunSetting
    from shuffled_dpsgd.tasks.audited import audit_target

    if mode not in MODES:
        raise InvalidArgumentError("--mode", expected=f"one of {MODES}", got=mode)
    setting = RunSetting(
        num_observations=observations,
        num_gradient_canaries=canaries,
        num_input_canaries=input_canaries,
        input_canary=input_canary,  # type: ignore[arg-type]  # checked by RunSetting
        other_records=other_records,
        seed=seed,
    )
    chosen = chosen_config(
        config,
        seed=seed,
        privacy={
            "budget": None if budget is None else str(budget.resolve()),
            "epsilon": epsilon,
            "noise_multiplier": noise_multiplier,
            "accounting": accounting,
            "batch_clip_norm": batch_clip_norm,
        },
        training={"epochs": epochs},
    )
    if chosen.privacy.budget is not None:
        # What a budget covers must not rest on a seed that the report shows.
        chosen = replace(chosen, seed=secrets.randbits(62))
    check_levels(delta=0.0, confidence=confidence)
    target = audit_target(chosen)
    audit = audit_steps if mode == "step" else audit_one_run
    with progress(quiet=as_json) as on_progress:
        report = audit(target, setting, confidence=confidence, on_progress=on_progress)
    deliver(report, output, as_json)


@app.command("run-folder")
@reports_errors
def run_folder(
    directory: opt.RunFolder,
    canaries: opt.GradientCanaries = 500,
    input_canaries: opt.FolderCanaries = None,
    input_canary: opt.InputCanary = "mislabelled",
    confidence: opt.Confidence = 0.95,
    seed: opt.Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Audit a finished run: train it once more with canaries, and put the bounds on its card.

    The repeat has the run's own records, noise, clip and steps, and is thrown away. What was found
    is in DIR/audit, and on the run's card, report and summary. Publishing it spends as much
    privacy as the run did; the card says so. With input canaries it is trained a third time,
    without privacy, and the report compares what a membership attack reaches.

    Example: shuffled-dpsgd audit run-folder runs/digits
    """
    from shuffled_dpsgd.auditing.target import RunSetting
    from shuffled_dpsgd.tasks.audited import audit_folder, write_audited_card

    setting = RunSetting(
        num_gradient_canaries=canaries,
        num_input_canaries=100 if input_canaries is None else input_canaries,
        input_canary=input_canary,  # type: ignore[arg-type]  # checked by RunSetting
        seed=seed,
    )
    with progress(quiet=as_json) as on_progress:
        report, card = audit_folder(
            directory,
            setting,
            confidence=confidence,
            on_progress=on_progress,
            spare_budget=input_canaries is None,
        )
    write_audited_card(directory, card, report.membership)
    deliver(report, directory / "audit", as_json)


@app.command()
@reports_errors
def sensitivity(
    config: opt.ConfigFile = None,
    model: opt.Model = None,
    strategy: privacy.Strategies = None,
    clip: privacy.Clip = "flat",
    clip_norm: opt.ClipNorm = 0.1,
    batch_clip_norm: privacy.BatchClipNorm = None,
    records: opt.NumRecords = 8,
    single: opt.Single = False,
    output: opt.Output = None,
    as_json: AsJson = False,
) -> None:
    """Replay a step on neighbouring batches, noise off: does any record move it beyond c?

    Example: shuffled-dpsgd audit sensitivity --model gpt2-tiny --strategy bookkeeping
    """
    reports = replay_target(
        config,
        model=model,
        strategies=tuple(strategy or choices_of("strategy")),
        clip=clip,
        clip_norm=clip_norm,
        batch_clip_norm=batch_clip_norm,
        num_records=records,
        double=not single,
    )
    found = {"reports": [report.to_json() for report in reports]}
    hand_over(found, output, as_json, lambda: show_checks(reports))
    if not all(report.passed for report in reports):
        raise typer.Exit(1)
