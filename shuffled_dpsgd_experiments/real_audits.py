"""Audits of pretrained models on real text, where a GPU is: the Python API and argparse alone.

    python -m shuffled_dpsgd_experiments.real_audits --model-dir MiniLM --format sst2 --data sst2 \
        --out results --mode one-run --epsilon 1 --delta 7.4e-6 --steps 200

AdamW, every step shuffled. `one-run` plants gradient canaries and records, each by a fair coin, and
follows the shuffle by re-aligning every pair of iterates; `step` releases one step many times with
and without each canary; `black-box` trains repeatedly with the shuffle and without and attacks with
shadow models; `runs` repeats whole runs with one canary and without. Each mode writes one JSON:
setting, claims, bounds, verdicts, cost, environment.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

import torch

from shuffled_dpsgd.auditing.input_canaries import InputCanary
from shuffled_dpsgd.auditing.run import (
    AuditTarget,
    RunSetting,
    audit_one_run,
    audit_steps,
)
from shuffled_dpsgd.environment import environment
from shuffled_dpsgd.runtime.attention import without_cudnn_attention
from shuffled_dpsgd.tasks import RunConfig, parse_config
from shuffled_dpsgd.tasks.audited import audit_target
from shuffled_dpsgd_experiments.audit_processes import make_runs, report_runs
from shuffled_dpsgd_experiments.audits.black_box import BlackBoxSetting
from shuffled_dpsgd_experiments.audits.repeated_runs import RepeatedSetting

MODES = ("one-run", "step", "black-box", "runs")
PROGRESS_SECONDS = 10.0
TASKS: dict[str, tuple[str, InputCanary]] = {
    "sst2": ("text-classification", "mislabelled"),
    "qnli": ("text-classification", "mislabelled"),
    "e2e": ("causal-lm", "scrambled"),
    "dart": ("causal-lm", "scrambled"),
}
"""Data format -> task, and the record canary that fits it."""


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(prog="real_audits", description=__doc__.split("\n", 1)[0])
    add = found.add_argument
    add("--model-dir", required=True, help="a folder saved by save_pretrained, or a preset")
    add("--format", required=True, choices=sorted(TASKS))
    add("--data", required=True, help="the folder of that format")
    add("--out", required=True, type=Path, help="folder for one JSON per mode")
    add("--mode", action="append", choices=MODES, help="repeat; all if not given")
    add("--name", default=None, help="start of the file names; the data format if not given")
    add("--epsilon", type=float, default=None, help="calibrate to this budget")
    add("--noise-multiplier", type=float, default=None, help="or: this noise")
    add("--accounting", choices=("certified", "paper"), default="certified")
    add("--batch-clip-norm", type=float, default=None)
    add("--delta", type=float, required=True)
    add("--clip-norm", type=float, default=0.1)
    add("--scope", choices=("paper", "full"), default="full")
    add("--steps", type=int, default=200)
    add("--batch-size", type=int, default=1000)
    add("--physical-batch-size", type=int, default=None)
    add("--learning-rate", type=float, default=5e-4)
    add("--max-train-examples", type=int, default=None)
    add("--max-length", type=int, default=128)
    add("--canaries", type=int, default=5000, help="gradient canaries of a one-run audit")
    add("--input-canaries", type=int, default=1000, help="records planted; also of a black box")
    add("--input-canary", choices=get_args(InputCanary), default=None)
    add("--observations", type=int, default=1000, help="releases per world of a step audit")
    add("--no-other-records", action="store_true", help="one-run: canaries take part alone")
    add(
        "--max-seconds",
        type=float,
        default=None,
        help="begin nothing more after so many seconds; one-run always trains to its end",
    )
    add("--seeds", type=int, default=8, help="runs per arm of a black-box audit")
    add("--runs", type=int, default=200, help="whole runs of the mode runs")
    add("--processes", type=int, default=1, help="that share the runs of black-box and runs")
    add("--fit-steps", type=int, default=0, help="fit the initial weights to the records first")
    add("--device", default="auto")
    add("--seed", type=int, default=0)
    return found


def config_of(options: argparse.Namespace) -> RunConfig:
    """The run under audit, as `train --config` would read it."""
    task, _ = TASKS[options.format]
    sections: dict[str, dict[str, Any]] = {
        "model": {"name": options.model_dir},
        "data": {
            "format": options.format,
            "path": options.data,
            "max_length": options.max_length,
            "max_train_examples": options.max_train_examples,
            "max_heldout_examples": 64,
        },
        "privacy": {
            "epsilon": options.epsilon,
            "noise_multiplier": options.noise_multiplier,
            "delta": options.delta,
            "clip_norm": options.clip_norm,
            "batch_clip_norm": options.batch_clip_norm,
            "accounting": options.accounting,
            "shuffle": "every-step",
            "scope": options.scope,
        },
        "optimizer": {"name": "adamw", "learning_rate": options.learning_rate},
        "training": {
            "expected_batch_size": options.batch_size,
            "num_steps": options.steps,
            "physical_batch_size": options.physical_batch_size,
            "device": options.device,
        },
    }
    given = {
        name: {key: value for key, value in section.items() if value is not None}
        for name, section in sections.items()
    }
    return parse_config({"task": task, "seed": options.seed, **given})


def progress(mode: str) -> Callable[[int, int], None]:
    """A line on standard error every `PROGRESS_SECONDS`, and at the end."""
    started = said = time.perf_counter()

    def report(done: int, total: int) -> None:
        nonlocal said
        now = time.perf_counter()
        if now > said + PROGRESS_SECONDS or done == total:
            print(f"{mode}: {done} of {total}, {now - started:.0f} s", file=sys.stderr, flush=True)
            said = now

    return report


def two_worlds(mode: str, config: RunConfig, options: argparse.Namespace) -> dict[str, Any]:
    """A one-run or a step audit."""
    target: AuditTarget = audit_target(config, fit_steps=options.fit_steps)
    setting = RunSetting(
        num_observations=options.observations,
        num_gradient_canaries=options.canaries,
        num_input_canaries=options.input_canaries,
        input_canary=options.input_canary or TASKS[options.format][1],
        other_records=not options.no_other_records,
        fit_steps=options.fit_steps,
        max_seconds=options.max_seconds,
        seed=options.seed,
    )
    audit = audit_one_run if mode == "one-run" else audit_steps
    return audit(target, setting, on_progress=progress(mode)).to_json()


def many_runs(mode: str, config: RunConfig, options: argparse.Namespace) -> dict[str, Any]:
    """A black-box audit or one of repeated runs, in as many processes as are asked for."""
    setting: RepeatedSetting | BlackBoxSetting = RepeatedSetting(
        num_runs=options.runs, seed=options.seed
    )
    if mode == "black-box":
        setting = BlackBoxSetting(
            num_seeds=options.seeds,
            num_canaries=options.input_canaries,
            input_canary=options.input_canary or TASKS[options.format][1],
            seed=options.seed,
        )
    started = time.perf_counter()
    found = make_runs(
        config,
        setting,
        processes=options.processes,
        max_seconds=options.max_seconds,
        fit_steps=options.fit_steps,
    )
    return report_runs(found, setting, seconds=time.perf_counter() - started)


def described(config: RunConfig) -> dict[str, Any]:
    """The configuration as it is published: names of folders, not where they lie."""
    found = config.without_seed()
    found["model"]["name"] = config.model.given_name
    found["data"]["path"] = Path(str(found["data"]["path"])).name
    return found


def command(arguments: Sequence[str], mode: str) -> str:
    """What writes this file again: names of folders, not where they lie, and one mode."""
    kept: list[str] = []
    for place, word in enumerate(arguments):
        before = arguments[place - 1] if place else ""
        if "--mode" in (word, before):
            continue
        folder = before in ("--model-dir", "--data")
        kept.append("results" if before == "--out" else Path(word).name if folder else word)
    return shlex.join(
        ["python", "-m", "shuffled_dpsgd_experiments.real_audits", *kept, "--mode", mode]
    )


def spent(started: float) -> dict[str, Any]:
    """What the audit took, on what, and what produced it."""
    cost: dict[str, Any] = {"seconds": time.perf_counter() - started, "device": "cpu"}
    if torch.cuda.is_available():
        cost["device"] = torch.cuda.get_device_name()
        cost["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return {"cost": cost, "environment": environment()}


@without_cudnn_attention()
def main(arguments: Sequence[str] | None = None) -> list[Path]:
    """Run the chosen modes one after the other; each is written as soon as it is done."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    options = parser().parse_args(given)
    config = config_of(options)
    options.out.mkdir(parents=True, exist_ok=True)
    written = []
    for mode in options.mode or MODES:
        started = time.perf_counter()
        name = options.name or options.format
        stem = f"audit_{name}_{mode.replace('-', '_')}_{options.accounting}"
        audit = many_runs if mode in ("black-box", "runs") else two_worlds
        found = audit(mode, config, options)
        path = options.out / f"{stem}.json"
        record = {
            "mode": mode,
            "command": command(given, mode),
            "fit_steps": options.fit_steps,
            "config": described(config),
            **found,
            **spent(started),
        }
        path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        print(path, flush=True)
        written.append(path)
    return written


if __name__ == "__main__":
    main()
