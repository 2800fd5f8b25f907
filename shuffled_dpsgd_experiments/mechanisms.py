"""What units, truncation and banded noise are worth in accuracy, beside plain DP-SGD at the same ε.

`python -m shuffled_dpsgd_experiments.mechanisms results/mechanisms.json DATA [FEATURES]` trains an
MLP on the digits and one on frozen MiniLM features of SST-2 (rounded to half precision; FEATURES is
the file of `frontier.sst2.features`, made if it is not there). Every way of training takes the best
of three learning rates, tried on records held back, and 20 seeds of its own on the held-out ones.
It goes on where it was broken off. `larger batches` computes as many records in fewer steps.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from shuffled_dpsgd import make_private
from shuffled_dpsgd.accounting import compare_units
from shuffled_dpsgd.environment import environment
from shuffled_dpsgd.models import seeded
from shuffled_dpsgd.tasks.config import OptimizerConfig
from shuffled_dpsgd.tasks.digits import load_digits
from shuffled_dpsgd.tasks.start import build_optimizer, build_scheduler
from shuffled_dpsgd_experiments.frontier.sst2 import WIDTH, features
from shuffled_dpsgd_experiments.provenance import commit

SEEDS, FIRST_SEED = 20, 100
OWNED = 4
"""Records of a unit: digits in the order of a fixed shuffle, four to each."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Data, their sizes, and the ways of training that are compared on them."""

    name: str
    epsilon: float
    delta: float
    batch: int
    steps: int
    rates: tuple[float, ...]
    ways: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def _ways(batch: int, steps: int, larger: int) -> dict[str, dict[str, Any]]:
    return {
        "independent noise": {},
        "largest batch 1.2 times": {"largest_batch": math.ceil(1.2 * batch)},
        "banded noise": {"noise": "banded"},
        f"{larger} times larger batches": {
            "expected_batch_size": larger * batch,
            "num_steps": steps // larger,
        },
    }


SETTINGS = (
    Setting(name="digits", epsilon=8.0, delta=1e-4, batch=144, steps=60,
            rates=(0.02, 0.04, 0.08), ways=_ways(144, 60, 4)),
    Setting(name="sst2-features", epsilon=1.0, delta=7.4e-6, batch=500, steps=60,
            rates=(0.01, 0.02, 0.04), ways=_ways(500, 60, 4)),
    Setting(name="sst2-features", epsilon=8.0, delta=7.4e-6, batch=500, steps=60,
            rates=(0.01, 0.02, 0.04), ways=_ways(500, 60, 4)),
    Setting(name="digits of units", epsilon=8.0, delta=1e-3, batch=36, steps=60,
            rates=(0.02, 0.04, 0.08), ways={"records drawn, groups accounted": {"group": OWNED},
                                            "units drawn": {"records_per_unit": OWNED}}),
)  # fmt: skip


class Rows(Dataset[Any]):
    """Records without tensors, which are slow to copy one by one when batches are checked."""

    def __init__(self, inputs: torch.Tensor, labels: torch.Tensor) -> None:
        self.inputs, self.labels = inputs, labels
        self._rows, self._classes = inputs.numpy(), labels.tolist()

    def __len__(self) -> int:
        return len(self._classes)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self._rows[index], self._classes[index]

    def part(self, chosen: list[int]) -> Rows:
        """Some of them."""
        return Rows(self.inputs[chosen], self.labels[chosen])


@dataclass(frozen=True, kw_only=True)
class Data:
    """Training and held-out records, those to tune with, and the model for all."""

    train: Rows
    heldout: Rows
    kept: Rows
    back: Rows
    width: int
    hidden: int
    classes: int

    def model(self, seed: int) -> nn.Module:
        """Initial weights of a seed."""
        with seeded(seed):
            first, last = nn.Linear(self.width, self.hidden), nn.Linear(self.hidden, self.classes)
        return nn.Sequential(nn.Flatten(), first, nn.GELU(), last)


def load(name: str, folder: Path, cache: Path) -> Data:
    """The data of a setting."""
    if name.startswith("digits"):
        train, heldout = (Rows(*each.tensors) for each in load_digits())
        sizes, held_back = {"width": 64, "hidden": 128, "classes": 10}, 288
    else:
        found = features(folder / "sst2", cache)
        train, heldout = (
            Rows(torch.from_numpy(rows).half().float(), torch.from_numpy(labels).long())
            for rows, labels in (found["train"], found["test"])
        )
        sizes, held_back = {"width": WIDTH, "hidden": 64, "classes": 2}, 6000
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(1)).tolist()
    kept, back = train.part(sorted(order[held_back:])), train.part(sorted(order[:held_back]))
    return Data(train=train, heldout=heldout, kept=kept, back=back, **sizes)


def train_once(
    setting: Setting, way: str, data: Data, *, rate: float, seed: int, tuning: bool
) -> dict[str, Any]:
    """One run and its score."""
    started = time.perf_counter()
    records, heldout = (data.kept, data.back) if tuning else (data.train, data.heldout)
    options: dict[str, Any] = {
        "dataset_size": len(records),
        "expected_batch_size": setting.batch,
        "num_steps": setting.steps,
        "epsilon": setting.epsilon,
    } | dict(setting.ways[way])
    group = options.pop("group", None)
    if setting.name == "digits of units":
        options |= _units(setting, len(records), group)
    model = data.model(seed)
    config = OptimizerConfig(learning_rate=rate, schedule="cosine")
    private = make_private(
        model, build_optimizer(model, config), delta=setting.delta, clip_norm=1.0, shuffle="off",
        seed=seed, physical_batch_size=8 * setting.batch, **options,
    )  # fmt: skip
    scheduler = build_scheduler(private.optimizer, config, private.plan.num_steps)
    private.on_update(scheduler.step)
    for x, y in private.batches(records):
        private.backward(F.cross_entropy(model(x), y, reduction="none"))
        private.step()
    plan, certified = private.plan, private.plan.certified()
    private.close()
    with torch.no_grad():
        accuracy = float((model(heldout.inputs).argmax(1) == heldout.labels).float().mean())
    return {
        "setting": setting.name,
        "target": setting.epsilon,
        "way": way,
        "stage": "tuning" if tuning else "figure",
        "learning_rate": rate,
        "seed": seed,
        "accuracy": accuracy,
        "certified_epsilon": None if certified is None else certified.epsilon,
        "accounted": "a unit of records by groups" if group else "as certified",
        "noise_multiplier": plan.smallest_noise_multiplier,
        "bands": plan.bands,
        "num_steps": plan.num_steps,
        "expected_batch_size": plan.expected_batch_size,
        "seconds": round(time.perf_counter() - started, 2),
        "commit": commit(),
    }


def _units(setting: Setting, size: int, group: int | None) -> dict[str, Any]:
    """Units of four records each; drawn as such, or protected as groups of records drawn alone."""
    num_units = math.ceil(size / OWNED)
    if group is None:
        ids = [record // OWNED for record in range(size)]
        return {"dataset_size": num_units, "unit": ids}
    found = compare_units(
        epsilon=setting.epsilon, delta=setting.delta, num_units=num_units, num_records=size,
        most_owned=group, expected_units=setting.batch, records_per_unit=OWNED,
        num_steps=setting.steps,
    )  # fmt: skip
    return {
        "expected_batch_size": OWNED * setting.batch,
        "epsilon": None,
        "noise_multiplier": found.noise_of_records,
    }


def main(path: Path, folder: Path, cache: Path) -> None:
    """Run what is missing, then write the summary."""
    lines = path.with_suffix(".jsonl")
    known = [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []

    def cell(setting: Setting, way: str, **place: Any) -> dict[str, Any]:
        wanted = {"setting": setting.name, "target": setting.epsilon, "way": way, **place}
        for record in known:
            if wanted.items() <= record.items():
                return record
        found = train_once(
            setting, way, data, rate=place["learning_rate"], seed=place["seed"],
            tuning=place["stage"] == "tuning",
        )  # fmt: skip
        known.append(found)
        with lines.open("a", encoding="utf-8") as file:
            file.write(json.dumps(found, allow_nan=False) + "\n")
        print(setting.name, setting.epsilon, way, place, f"{found['accuracy']:.4f}", flush=True)
        return found

    rows = []
    for setting in SETTINGS:
        data = load(setting.name, folder, cache)
        runs: dict[str, list[dict[str, Any]]] = {}
        for way in setting.ways:
            tried = {
                rate: cell(setting, way, stage="tuning", learning_rate=rate, seed=0)["accuracy"]
                for rate in setting.rates
            }
            best = max(tried, key=lambda rate: tried[rate])
            runs[way] = [
                cell(setting, way, stage="figure", learning_rate=best, seed=FIRST_SEED + seed)
                for seed in range(SEEDS)
            ]
        rows += [_row(setting, way, found, runs) for way, found in runs.items()]
    summary = {"rows": rows, "environment": environment()}
    path.write_text(json.dumps(summary, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def _row(
    setting: Setting, way: str, found: list[dict[str, Any]], runs: Mapping[str, Any]
) -> dict[str, Any]:
    scores = [each["accuracy"] for each in found]
    first = [each["accuracy"] for each in next(iter(runs.values()))]
    apart = [a - b for a, b in zip(scores, first, strict=True)]
    kept = ("noise_multiplier", "bands", "num_steps", "expected_batch_size", "certified_epsilon")
    protected = "unit" if setting.name == "digits of units" else "record"
    grouped = found[0]["accounted"] != "as certified"
    return {
        "setting": setting.name,
        "epsilon": setting.epsilon,
        "epsilon_of": protected,
        "certified_epsilon_of": "record" if grouped else protected,
        "kind": "proven",
        "delta": setting.delta,
        "way": way,
        "learning_rate": found[0]["learning_rate"],
        **{name: found[0][name] for name in kept},
        "seeds": len(scores),
        "mean_accuracy": fmean(scores),
        "standard_error": stdev(scores) / math.sqrt(len(scores)),
        "gain_over_first": fmean(apart),
        "standard_error_of_gain": stdev(apart) / math.sqrt(len(apart)),
        "commits": sorted({each["commit"] for each in found}),
    }


if __name__ == "__main__":
    arguments = [*sys.argv[1:], "runs/frontier/sst2-features.npz"]
    main(*(Path(each) for each in arguments[:3]))
