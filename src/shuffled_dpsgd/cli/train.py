"""`shuffled-dpsgd train`: a private run from the embedded default, a TOML file or a folder."""

from __future__ import annotations

import os
import time
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shuffled_dpsgd.cli import privacy_options as opt
from shuffled_dpsgd.cli.advise import advise_on
from shuffled_dpsgd.cli.output import AsJson, is_first_rank, print_json, verb
from shuffled_dpsgd.cli.run_start import ConfigFile, Task, stated_run, with_overrides
from shuffled_dpsgd.cli.trackers import Observer, find_tracker
from shuffled_dpsgd.errors import InvalidArgumentError

if TYPE_CHECKING:
    from shuffled_dpsgd.distributed import World
    from shuffled_dpsgd.tasks import PreparedRun, RunConfig

INTERRUPTED = 130

Resume = Annotated[Path | None, typer.Option(help="Continue the run in this folder.")]
Output = Annotated[Path | None, typer.Option(help="A new folder for everything the run writes.")]
Checkpoint = Annotated[
    str | None, typer.Option(help="With --resume: an earlier checkpoint, by its folder's name.")
]
PresetName = Annotated[
    str | None,
    typer.Option(
        help="A row of the paper's Table 1, such as paper/vit-cifar100, or a recipe: "
        "recipe/digits, recipe/digits-linear or recipe/sst2-minilm; needs --epsilon."
    ),
]
ModelFolder = Annotated[
    str | None, typer.Option(help="With --preset: the checkpoint's folder; else from the hub.")
]
DataFolder = Annotated[
    str | None, typer.Option(help="With --preset: the data's folder; else from the hub.")
]
LearningRate = Annotated[float | None, typer.Option(help="Peak learning rate.")]
Tracker = Annotated[
    str | None,
    typer.Option(
        help="Called with the metrics of every step; they are private.",
        metavar="tensorboard|module:function",
    ),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Only print the plan and what it can hope for.")
]
Secure = Annotated[bool, typer.Option("--secure", help="Noise from the operating system.")]


@verb(
    "train digits",
    "train digits --epsilon 8 --shuffle at-release --output runs/eight",
    "train --config sst2.toml",
    "train --preset paper/bert-sst2 --epsilon 1 --dry-run",
    "train --resume runs/eight",
)
def train(
    task: Task = None,
    config: ConfigFile = None,
    preset: PresetName = None,
    model: ModelFolder = None,
    data: DataFolder = None,
    resume: Resume = None,
    checkpoint: Checkpoint = None,
    output: Output = None,
    epsilon: opt.Epsilon = None,
    delta: opt.Delta = None,
    method: opt.Method = None,
    accounting: opt.Accounting = None,
    clip_norm: opt.ClipNorm = None,
    batch_clip_norm: opt.BatchClipNorm = None,
    shuffle: opt.Shuffle = None,
    scope: opt.Scope = None,
    noise_frame: opt.NoiseFrame = None,
    epochs: opt.Epochs = None,
    batch_size: opt.BatchSize = None,
    budget: opt.BudgetFile = None,
    learning_rate: LearningRate = None,
    seed: opt.Seed = None,
    secure: Secure = False,
    tracker: Tracker = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Train privately with weight shuffling, and leave weights, a privacy card and a report.

    Noise is calibrated to a certified (proven) ε unless `--accounting paper` asks for the paper's
    own formula, whose ε is heuristic. Ctrl-C finishes the step and writes a checkpoint.
    """
    follow = find_tracker(tracker)
    overrides: dict[str, dict[str, Any]] = {
        "privacy": {
            "epsilon": epsilon,
            "delta": delta,
            "method": method,
            "accounting": accounting,
            "clip_norm": clip_norm,
            "batch_clip_norm": batch_clip_norm,
            "shuffle": shuffle,
            "scope": scope,
            "noise_frame": noise_frame,
            "budget": None if budget is None else str(budget.resolve()),
        },
        "training": {"epochs": epochs, "expected_batch_size": batch_size},
        "optimizer": {"learning_rate": learning_rate},
    }
    if resume is not None:
        given: dict[str, Any] = {"TASK": task, "--config": config, "--preset": preset}
        given |= {"--model": model, "--data": data, "--output": output, "--seed": seed}
        _refuse_with_resume(given | {"--secure": secure, "--dry-run": dry_run}, overrides)
        if _is_finished(resume, checkpoint, as_json=as_json):
            return
        from shuffled_dpsgd.tasks import load_run

        chosen = load_run(resume)
    elif checkpoint is not None:
        raise InvalidArgumentError("--checkpoint", expected="--resume beside it", got=checkpoint)
    else:
        raw = stated_run(task, config, preset=preset, model=model, data=data)
        # The built-in default has a seed. A budget refuses the same seed twice.
        unsaid = budget is not None and seed is None and config is None
        chosen = with_overrides(raw, overrides, seed=seed, secure=secure or unsaid)
        if dry_run:
            if is_first_rank():  # It needs no other rank for the plan.
                for name in ("RANK", "WORLD_SIZE"):
                    os.environ.pop(name, None)
                advise_on(chosen, as_json=as_json, preset=preset if data is None else None)
            return
    from shuffled_dpsgd.distributed import launched

    with launched(chosen.training.device) as world:
        run = _prepared(world, chosen, output=output, resume=resume, checkpoint=checkpoint)
        observers = follow(run.directory) if world.leads else ()
        finished = _execute(run, observers, as_json=as_json)
    if not finished:
        raise typer.Exit(INTERRUPTED)


def _prepared(
    world: World,
    config: RunConfig,
    *,
    output: Path | None,
    resume: Path | None,
    checkpoint: str | None,
) -> PreparedRun:
    """A new or resumed run; after a restart by torchrun, the run that was begun in the folder."""
    from shuffled_dpsgd.tasks import is_run_folder, load_run, prepare

    if resume is not None:
        return prepare(config, resume, resume=True, checkpoint=checkpoint)
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") not in ("", "0"):
        if output is None:
            raise InvalidArgumentError(
                "--output",
                expected="a folder, so that a restarted launch finds its run again",
                got=None,
                remedy="pass --output, or resume the folder it wrote to with --resume",
            )
        if is_run_folder(output):
            return prepare(load_run(output), output, resume=True)
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    return prepare(config, world.from_first(output or Path("runs") / f"{config.task}-{stamp}"))


def _is_finished(directory: Path, checkpoint: str | None, *, as_json: bool) -> bool:
    """Whether the run has ended; if so, say it without loading model and data."""
    from shuffled_dpsgd.tasks import finished_summary

    summary = None if checkpoint else finished_summary(directory)
    if summary is None:
        return False
    if not is_first_rank():
        return True
    if as_json:
        print_json(summary | {"output": str(directory), "already_finished": True})
        return True
    typer.echo(
        f"This run finished on {summary['date'][:10]} after {summary['steps_taken']} steps: "
        f"nothing is left to train. Its weights are in {directory / 'model'}, its report is "
        f"{directory / 'report.html'}. For more steps start another run, whose ε adds to its own."
    )
    return True


def _refuse_with_resume(given: dict[str, Any], overrides: dict[str, dict[str, Any]]) -> None:
    for section, values in overrides.items():
        given |= {f"{section}.{key}": value for key, value in values.items()}
    extra = [name for name, value in given.items() if value is not None and value is not False]
    if extra:
        raise InvalidArgumentError(
            "--resume",
            expected="no other setting: the folder holds them all",
            got=", ".join(extra),
            remedy="a resumed run keeps the plan its ledger was opened for",
        )


def _execute(run: PreparedRun, observers: tuple[Observer, ...], *, as_json: bool) -> bool:
    """Train; rank 0 shows the progress."""
    from shuffled_dpsgd.tasks import execute

    if as_json or not run.private.world.leads:
        result = execute(run, observers)
        if run.private.world.leads:
            print_json(result.summary | {"output": str(result.directory)})
        return result.outcome.finished
    from rich.console import Console

    from shuffled_dpsgd.cli.training_display import TrainingBar, announcement, conclusion

    console = Console()
    console.print(announcement(run))
    started = time.monotonic()
    with TrainingBar(run, console) as bar:
        result = execute(run, observers=(bar.update, *observers))
    console.print(conclusion(result, run, time.monotonic() - started))
    return result.outcome.finished
