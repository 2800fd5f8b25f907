"""What public pre-training programs share: options, a loop that ends by the clock, the files."""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from shuffled_dpsgd.environment import environment
from shuffled_dpsgd.errors import DivergenceError
from shuffled_dpsgd.tasks.models import no_progress_bars

WARM_UP = 0.05
CHECK_EVERY = 20


def make_parser(name: str, description: str, **defaults: int) -> argparse.ArgumentParser:
    """A parser of the common options; sizes, batch and epochs have `defaults`."""
    found = argparse.ArgumentParser(prog=name, description=description)
    add = found.add_argument
    add("--out", required=True, type=Path, help="folder for the checkpoint and pretraining.json")
    for option, value in defaults.items():
        add(f"--{option.replace('_', '-')}", type=int, default=value)
    add("--learning-rate", type=float, default=1e-3)
    add("--weight-decay", type=float, default=0.1)
    add("--seconds", type=float, default=200.0, help="stop training after so long")
    add("--max-records", type=int, default=None, help="use at most so many, for a trial")
    add("--seed", type=int, default=0)
    add("--stored", choices=("float32", "bf16"), default="float32", help="bf16 halves the files")
    add("--device", default="auto")
    return found


def rate_at(progress: float) -> float:
    """The share of the peak learning rate: a linear warm-up, then a cosine to zero.

    >>> [round(rate_at(p), 3) for p in (0.0, 0.025, 0.05, 0.525, 1.0)]
    [0.0, 0.5, 1.0, 0.5, 0.0]
    """
    if progress < WARM_UP:
        return progress / WARM_UP
    return 0.5 * (1.0 + math.cos(math.pi * (progress - WARM_UP) / (1.0 - WARM_UP)))


def pretrain(
    model: torch.nn.Module,
    losses: Callable[[], Iterator[torch.Tensor]],
    evaluate: Callable[[], dict[str, float]],
    options: argparse.Namespace,
    *,
    steps_per_epoch: int,
    keeps_best: bool,
) -> dict[str, Any]:
    """Train to the end of the epochs or of the time: what was done, and scores of every epoch.

    `losses` gives one epoch, a loss for each step; `evaluate` has the held-out scores. Progress is
    by steps or by the clock, whichever is further, so the learning rate ends near zero either way.
    The model is left with its last weights, or with those of the least `heldout_loss`.

    Raises:
        DivergenceError: a loss is infinite or NaN; nothing would be kept of the rest.
    """
    optimizer = decaying_matrices(model, options.weight_decay)
    num_steps, started, step = options.epochs * steps_per_epoch, time.monotonic(), 0
    curve: list[dict[str, float]] = []
    best: dict[str, torch.Tensor] = {}

    def progress() -> float:
        return max(step / num_steps, (time.monotonic() - started) / options.seconds)

    model.train()
    while progress() < 1.0:
        for loss in losses():
            # The first step would have a rate of zero.
            rate = options.learning_rate * rate_at(min(max(progress(), WARM_UP / num_steps), 1.0))
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            step += 1
            if step % CHECK_EVERY == 1:
                refuse_divergence(loss, step)
            if progress() >= 1.0:
                break
        refuse_divergence(loss, step)
        scores = {"train_loss": loss.item(), **evaluate()}
        scores = {name: round(value, 4) for name, value in scores.items()}
        curve.append({"step": step, "seconds": round(time.monotonic() - started, 1), **scores})
        print(curve[-1], flush=True)
        if keeps_best and scores["heldout_loss"] <= min(one["heldout_loss"] for one in curve):
            best = {name: value.clone() for name, value in model.state_dict().items()}
    if keeps_best:
        model.load_state_dict(best)
    return {"steps": step, "seconds": round(time.monotonic() - started, 1), "curve": curve}


def decaying_matrices(model: torch.nn.Module, weight_decay: float) -> torch.optim.AdamW:
    """AdamW that decays matrices and leaves biases and norms alone."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": others},
    ]
    fused = next(model.parameters()).is_cuda
    return torch.optim.AdamW(groups, lr=0.0, weight_decay=0.0, betas=(0.9, 0.95), fused=fused)


def refuse_divergence(loss: torch.Tensor, steps: int) -> None:
    if not math.isfinite(loss.item()):
        raise DivergenceError(
            f"the loss is {loss.item()} after {steps} steps; lower --learning-rate"
        )


def round_as_stored(model: torch.nn.Module, options: argparse.Namespace) -> None:
    """Round weights as they will be stored, in place, so that scores are those of the files."""
    if options.stored == "bf16":
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.bfloat16())


def save(model: Any, options: argparse.Namespace, record: dict[str, Any]) -> Path:
    """The checkpoint, and beside it what it is; names of places are left out."""
    places = ("data", "texts", "out", "note")
    options.out.mkdir(parents=True, exist_ok=True)
    device = next(model.parameters()).device
    with no_progress_bars():
        (model.bfloat16() if options.stored == "bf16" else model).save_pretrained(options.out)
    record |= {
        "settings": {name: value for name, value in vars(options).items() if name not in places},
        "environment": environment(str(device)),
    }
    path: Path = options.out / "pretraining.json"
    path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(path, flush=True)
    return path
