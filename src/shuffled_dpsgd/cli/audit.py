"""`shuffled-dpsgd audit`: what an adversary really learns, held against what is claimed."""

from __future__ import annotations

import secrets
from dataclasses import replace

import typer

from shuffled_dpsgd.cli import audit_options as opt
from shuffled_dpsgd.cli import privacy_options as privacy
from shuffled_dpsgd.cli.audit_output import deliver, hand_over, progress, show_checks
from shuffled_dpsgd.cli.audit_target import chosen_config, replay_target
from shuffled_dpsgd.cli.experiments import AUDITS, register
from shuffled_dpsgd.cli.output import AsJson, reports_errors, shown_examples
from shuffled_dpsgd.errors import require
from shuffled_dpsgd.options import choices_of

app = typer.Typer(
    name="audit",
    epilog=shown_examples(
        "audit run --mode one-run --epsilon 1 --epochs 10",
        "audit run-folder runs/digits",
        "audit sensitivity --model gpt2-tiny",
    ),
    help="Attack the mechanism and hold every claimed ε against what the attacks show. "
    "Exit status 1: a proven claim was refuted, or a replay check failed.",
    no_args_is_help=True,
)
MODES = ("step", "one-run")


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

    require(mode in MODES, "--mode", f"one of {MODES}", mode)
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


register(app, AUDITS, "audits.verbs", prefix="audit ")
