"""Table 2: the same run with and without shuffling, in a common frame of noise.

`demo` trains on digits, `paper` what examples/table2_sst2.toml says. Both runs see the same batches
and the same noise, drawn for the weights as if they had never moved (`noise_frame = "unshuffled"`);
then they follow the same trajectory to rounding. Dropout is off, because its masks are drawn by
position and would differ. The distance is that of the weights before and after one shuffle.
"""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shuffled_dpsgd.environment import environment
from shuffled_dpsgd.permutation import apply, discover, draw
from shuffled_dpsgd.tasks import RunConfig, Task, build_task, load_config, parse_config
from shuffled_dpsgd.tasks.start import chosen_device, start_private
from shuffled_dpsgd_experiments.exhibits import Exhibit, ExhibitRow, in_one_file, origin_of
from shuffled_dpsgd_experiments.sweeps.cell import train_on
from shuffled_dpsgd_experiments.tables.printed import INVARIANCE, WEIGHT_DISTANCE

TITLE = "Table 2: permutation invariance"
REAL = Path(__file__).parents[2] / "examples" / "table2_sst2.toml"
MODES = ("non-private", "DPSGD")
AGREE = 1e-3
"""Losses closer than this, relative to one of them, are called equal: float32, many steps."""


def demo_config() -> RunConfig:
    """Digits, a small ViT from scratch."""
    return parse_config(
        {
            "task": "digits",
            "seed": 0,
            "model": {"name": "vit-digits"},
            "data": {"format": "digits"},
            "privacy": {"epsilon": 1.0, "delta": 1e-4, "clip_norm": 1.0},
            "optimizer": {"learning_rate": 1e-2, "schedule": "cosine"},
            "training": {
                "expected_batch_size": 288,
                "epochs": 10,
                "physical_batch_size": 512,
                "num_threads": 1,
            },
        }
    )


def run(scale: str, config: RunConfig | None = None) -> dict[str, Any]:
    """Four trainings of one model, two in each mode, and the distance a shuffle makes."""
    config = config or (demo_config() if scale == "demo" else load_config(REAL))
    task = build_task(config)
    return {
        "scale": scale,
        "model": config.model.given_name,
        "data": config.data.given_name,
        "score_name": task.score_name,
        "weight_distance": weight_distance(task.model, seed=0),
        "modes": {mode: _compare(config, task, mode) for mode in MODES},
        "environment": environment(str(chosen_device(config.training.device))),
    }


def weight_distance(model: nn.Module, *, seed: int) -> dict[str, float]:
    """ℓ2 distance of all weights before and after one shuffle, and after it is undone."""
    moved = copy.deepcopy(model).cpu()
    spec = discover(moved, scope="paper")
    permutation = draw(spec, torch.Generator().manual_seed(seed))
    apply(permutation, moved)
    after = _distance(model, moved)
    apply(permutation.inverse(), moved)
    norm = math.sqrt(sum(float(p.detach().double().square().sum()) for p in model.parameters()))
    return {"shuffled": after, "undone": _distance(model, moved), "weight_norm": norm}


def _distance(one: nn.Module, other: nn.Module) -> float:
    total = 0.0
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        total += float((a.detach().cpu().double() - b.detach().cpu().double()).square().sum())
    return math.sqrt(total)


def _compare(config: RunConfig, task: Task, mode: str) -> dict[str, Any]:
    raw = config.to_json()
    budget = {key: raw["privacy"][key] for key in ("delta", "epsilon", "clip_norm")}
    if mode != "DPSGD":
        budget = {"delta": budget["delta"], "noise_multiplier": 0.0, "clip_norm": "inf"}
    sides = {
        "unshuffled": {"shuffle": "off"},
        "shuffled": {"shuffle": "every-step", "noise_frame": "unshuffled"},
    }
    return {
        side: _train(parse_config({**raw, "privacy": {**budget, **options}}), task)
        for side, options in sides.items()
    }


def _train(config: RunConfig, task: Task) -> dict[str, Any]:
    model = copy.deepcopy(task.model).to(chosen_device(config.training.device))
    model.eval()  # No dropout; layers without it compute the same in either mode.
    private = start_private(config, model, dataset_size=len(task.train_data))
    train_on(config, task, private)
    found = task.evaluate(model)
    certified = private.plan.certified()
    return {
        "loss": found.loss,
        "score": found.score,
        "certified_epsilon": None if certified is None else certified.epsilon,
        "distance_from_start": _distance(task.model, model),
    }


def show(raw: dict[str, Any]) -> Exhibit:
    """Losses and scores of both sides, and the distance."""
    rows = []
    for mode, sides in raw["modes"].items():
        plain, shuffled = sides["unshuffled"], sides["shuffled"]
        gap = abs(plain["loss"] - shuffled["loss"])
        same = gap <= AGREE * abs(plain["loss"])
        pairs = {model: INVARIANCE[model, mode] for model in ("ViT", "BERT")}
        printed = "; ".join(f"{name} {loss:g} / {score} %" for name, (loss, score) in pairs.items())
        epsilon = plain["certified_epsilon"]
        rows.append(
            ExhibitRow(
                what=f"{mode}: test loss / {raw['score_name']}",
                paper=f"{printed}; shuffled the same",
                ours=f"{plain['loss']:.6g} / {plain['score']:.2%}; shuffled {shuffled['loss']:.6g} "
                f"/ {shuffled['score']:.2%}",
                certified="none" if epsilon is None else f"{epsilon:.3g}",
                verdict=_verdict(gap, same=same),
            )
        )
    distance = raw["weight_distance"]
    rows.append(
        ExhibitRow(
            what="distance of the weights before and after a shuffle",
            paper=f"{WEIGHT_DISTANCE} (ViT-B, pretrained)",
            ours=f"{distance['shuffled']:.2f}; undone {distance['undone']:g}",
            verdict=f"another model: {raw['model']}, whose weights have norm "
            f"{distance['weight_norm']:.2f}; a shuffle moves them by about √2 of what it moves",
        )
    )
    return Exhibit(
        name="table2",
        title=TITLE,
        origin=f"{raw['model']} on {raw['data']}. {origin_of(raw)}",
        rows=tuple(rows),
        notes=(
            "The paper's models and data differ from ours; equality is compared, not the score.",
            "Without a common frame of noise the two runs agree in distribution only.",
        ),
    )


def _verdict(gap: float, *, same: bool) -> str:
    if not same:
        return f"differ by {gap:.3g}: rounding grew along the run"
    return f"equal to rounding: the losses {f'differ by {gap:.0e}' if gap else 'do not differ'}"


TABLE = in_one_file("table2", TITLE, run, show)
