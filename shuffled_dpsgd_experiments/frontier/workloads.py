"""What the frontier is drawn on: data, a model per seed, and one length of training for all runs.

Runs of one workload differ in noise, batch clip, learning rate and seed, and in nothing else. Rates
are tuned on training records that are held back; the held-out sets are looked at once, at the end.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import TensorDataset

from shuffled_dpsgd.models import seeded
from shuffled_dpsgd.tasks import Task
from shuffled_dpsgd.tasks.classification import classification_task
from shuffled_dpsgd.tasks.data.image_files import read_npz
from shuffled_dpsgd.tasks.data.loading import Splits, drawn_part
from shuffled_dpsgd.tasks.digits import load_digits
from shuffled_dpsgd_experiments.exhibits import in_clips
from shuffled_dpsgd_experiments.frontier.sst2 import (
    SPLITS,
    WIDTH,
    before_last_layer,
    encoder,
    features,
    sentences,
)
from shuffled_dpsgd_experiments.provenance import data_digest

CLIP_NORM = 1.0
RATIOS = (1.0, 3.0, 10.0, 30.0, 100.0)
OPACUS, LESS_NOISE, OURS = "rdp, constant rate", "constant rate", ""
INGREDIENTS = (OPACUS, LESS_NOISE, OURS)
"""Opacus' defaults; with noise by PLD; with a cosine schedule too, as everywhere else."""
PAIRED_SEEDS = 30
"""Seeds at the ε where ingredients are compared, at least."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """One point of a curve before its noise is known.

    Of DP-SGD, `epsilon` is certified. Of the paper's algorithm it is claimed, which is heuristic,
    and `batch_clip_ratio` is c'/c. `ingredients` is one of `INGREDIENTS`; the curves have `OURS`.
    """

    epsilon: float
    batch_clip_ratio: float | None = None
    ingredients: str = OURS

    @property
    def is_paper(self) -> bool:
        return self.batch_clip_ratio is not None

    def describe(self) -> str:
        """For people."""
        if self.batch_clip_ratio is None:
            added = f", {self.ingredients}" if self.ingredients else ""
            return f"DP-SGD at certified ε = {self.epsilon:g}{added}"
        return f"paper's at claimed ε = {self.epsilon:g}, c' = {in_clips(self.batch_clip_ratio)}"

    def options(self, scope: str = "paper") -> dict[str, Any]:
        """What `make_private` is told of it."""
        if self.batch_clip_ratio is None:
            accounting = "rdp" if self.ingredients == OPACUS else "certified"
            return {"epsilon": self.epsilon, "accounting": accounting, "shuffle": "off"}
        return {
            "epsilon": self.epsilon,
            "accounting": "paper",
            "shuffle": "every-step",
            "scope": scope,
            "batch_clip_norm": self.batch_clip_ratio * CLIP_NORM,
        }


@dataclass(frozen=True, kw_only=True)
class Material:
    """Loaded data: a task to tune on, one to score, and a digest of all records."""

    tuning: Task
    scored: Task
    digest: str


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A data set, a model, and what all runs on them share."""

    name: str
    title: str
    load: Callable[[Path | None], Material]
    num_classes: int
    num_steps: int
    expected_batch_size: int
    delta: float
    middle_rate: float
    budgets: tuple[float, ...]
    claims: tuple[float, ...] = ()
    ratios: tuple[float, ...] = RATIOS
    num_seeds: int
    num_tuning_seeds: int = 1
    scope: Literal["paper", "full"] = "paper"
    floor: str | None = None
    """The workload of a linear model on the same data, which every other model should beat."""
    ingredients_at: float | None = None
    """Where DP-SGD is also run with the ingredients of others, by equal seeds."""

    def points(self) -> list[Point]:
        """DP-SGD from little ε to much, other ingredients of it, then the paper's algorithm."""
        own = [Point(epsilon=epsilon) for epsilon in self.budgets]
        if self.ingredients_at is not None:
            others = (OPACUS, LESS_NOISE)
            own += [Point(epsilon=self.ingredients_at, ingredients=each) for each in others]
        return own + [
            Point(epsilon=claim, batch_clip_ratio=ratio)
            for claim in self.claims
            for ratio in self.ratios
        ]

    def seeds_of(self, point: Point) -> int:
        """How many runs a point of the figure has."""
        paired = point.epsilon == self.ingredients_at and not point.is_paper
        return max(self.num_seeds, PAIRED_SEEDS) if paired else self.num_seeds

    def settings(self) -> dict[str, Any]:
        """What every run of the workload has in common."""
        return {
            "num_steps": self.num_steps,
            "expected_batch_size": self.expected_batch_size,
            "delta": self.delta,
            "clip_norm": CLIP_NORM,
            "optimizer": "adamw, cosine, no weight decay",
        }


def settings_digest(workload: Workload, data: str) -> str:
    """Equal for runs that differ in point, rate and seed alone; `data` is a digest."""
    text = json.dumps([workload.settings(), data], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _load_digits(fresh_model: Callable[[int], nn.Module], data: Path | None) -> Material:
    train, test = map(_plain, load_digits())
    return _material("digits", train, {"test": test}, 287, fresh_model, _collate)


def _load_features(fresh_model: Callable[[int], nn.Module], data: Path | None) -> Material:
    found = features(_folder(data, "sst2"))
    splits = {
        name: [(row, int(label)) for row, label in zip(*found[name], strict=True)]
        for name in SPLITS
    }
    train = splits.pop("train")
    return _material("sst2-features", train, splits, 6_000, fresh_model, _collate)


def _load_cifar100(data: Path | None) -> Material:
    folder = _folder(data, "cifar100")
    splits = {}
    for split in ("train", "test"):
        images, labels = read_npz(folder, split, 100)
        splits[split] = list(zip(images.reshape(len(images), -1), labels.tolist(), strict=True))
    train = splits.pop("train")
    fresh_model = partial(_linear, train[0][0].size, 100)
    return _material("cifar100", train, splits, 5_000, fresh_model, _collate_pixels)


def _load_lora(data: Path | None) -> Material:
    texts = sentences(_folder(data, "sst2"))
    chosen = drawn_part(len(texts["train"]), 2_000)
    texts["train"] = [texts["train"][place] for place in chosen]
    splits = {
        name: list(zip(before_last_layer(each), (text.label for text in each), strict=True))
        for name, each in texts.items()
    }
    train, layer = splits.pop("train"), encoder().encoder.layer[-1]
    return _material("sst2-lora", train, splits, 400, partial(_adapted, layer), _collate_tokens)


def _material(
    name: str,
    train: list[Any],
    heldout: Mapping[str, list[Any]],
    num_held_back: int,
    fresh_model: Callable[[int], nn.Module],
    collate: Callable[[list[Any]], Any],
) -> Material:
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(1)).tolist()
    kept, back = sorted(order[num_held_back:]), sorted(order[:num_held_back])
    whole = Splits(train=train, heldout=dict(heldout))
    part = Splits(
        train=[train[place] for place in kept],
        heldout={"held back": [train[place] for place in back]},
    )

    def task(splits: Splits[Any]) -> Task:
        model = fresh_model(0)
        return classification_task(name, model, splits, fresh_model=fresh_model, collate=collate)

    records = [train, *(heldout[split] for split in sorted(heldout))]
    return Material(tuning=task(part), scored=task(whole), digest=data_digest(records))


def _plain(data: TensorDataset) -> list[tuple[Any, int]]:
    """Records without tensors, which are slow to copy one by one when batches are checked."""
    images, labels = data.tensors
    return list(zip(images.numpy(), labels.tolist(), strict=True))


def _collate(samples: list[tuple[Any, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.from_numpy(np.stack([each for each, _ in samples]))
    return inputs, torch.tensor([label for _, label in samples])


def _collate_pixels(samples: list[tuple[Any, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes to numbers from -1 to 1."""
    pixels, labels = _collate(samples)
    return pixels.float() / 127.5 - 1.0, labels


def _mlp(inputs: int, hidden: int, classes: int, seed: int) -> nn.Module:
    """Its hidden units move by Theorem 1, and so does all of it but the biases of the classes."""
    with seeded(seed):
        layers = nn.Linear(inputs, hidden), nn.GELU(), nn.Linear(hidden, classes)
    return nn.Sequential(nn.Flatten(), *layers)


def _linear(inputs: int, classes: int, seed: int) -> nn.Module:
    """Logistic regression, from zero."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(inputs, classes))
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    return model


class _LastLayer(nn.Module):
    """The last layer of an encoder, the mean over tokens, and a head."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        unseen = torch.where(mask[:, None, None, :], 0.0, torch.finfo(hidden.dtype).min)
        weights = mask[:, :, None].to(hidden.dtype)
        means = (self.layer(hidden, unseen) * weights).sum(1) / weights.sum(1)
        return torch.as_tensor(self.head(means))


def _adapted(layer: nn.Module, seed: int) -> nn.Module:
    """Both factors of LoRA move along their rank; no theorem of the paper is about them."""
    import peft

    with seeded(seed):
        settings = peft.LoraConfig(
            r=8, lora_alpha=16, target_modules=["query", "value"], modules_to_save=["head"]
        )
        adapted: nn.Module = peft.get_peft_model(_LastLayer(copy.deepcopy(layer)), settings)
        return adapted


def _collate_tokens(samples: list[tuple[Any, int]]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Sentences padded to the longest, with a mask of their tokens."""
    rows = [torch.from_numpy(row).float() for row, _ in samples]
    lengths = torch.tensor([len(row) for row in rows])
    inputs = {
        "hidden": pad_sequence(rows, batch_first=True),
        "mask": torch.arange(int(lengths.max())) < lengths[:, None],
    }
    return inputs, torch.tensor([label for _, label in samples])


def _folder(data: Path | None, name: str) -> Path:
    return (data or Path("data")) / name


_DIGITS = dict[str, Any](num_classes=10, num_steps=60, expected_batch_size=144, delta=1e-4)
_DIGITS |= {"middle_rate": 0.02, "num_seeds": 50, "num_tuning_seeds": 2}
_SST2 = dict[str, Any](num_classes=2, num_steps=60, expected_batch_size=500, delta=7.4e-6)
_SST2 |= {"middle_rate": 0.005, "num_seeds": 20}
WORKLOADS: Mapping[str, Workload] = {
    each.name: each
    for each in (
        Workload(
            name="digits",
            title="Digits, an MLP from scratch",
            load=partial(_load_digits, partial(_mlp, 64, 128, 10)),
            budgets=(0.5, 0.8, 1.0, 1.75, 2.0, 4.0, 8.0, 16.0, 60.0),
            claims=(0.5, 3.0),
            floor="digits-linear",
            ingredients_at=1.0,
            **_DIGITS,
        ),
        Workload(
            name="digits-linear",
            title="Digits, logistic regression",
            load=partial(_load_digits, partial(_linear, 64, 10)),
            budgets=(0.1, 0.3, 0.5, 1.0, 3.0, 8.0, 60.0),
            **_DIGITS,
        ),
        Workload(
            name="sst2-features",
            title="SST-2, an MLP on frozen MiniLM features",
            load=partial(_load_features, partial(_mlp, WIDTH, 64, 2)),
            budgets=(0.0625, 0.125, 0.25, 0.5, 1.0, 3.0, 16.0),
            claims=(0.5,),
            floor="sst2-linear",
            ingredients_at=1.0,
            **_SST2,
        ),
        Workload(
            name="sst2-linear",
            title="SST-2, logistic regression on frozen MiniLM features",
            load=partial(_load_features, partial(_linear, WIDTH, 2)),
            budgets=(0.0625, 0.1, 0.5, 1.0, 8.0),
            **_SST2,
        ),
        Workload(
            name="sst2-lora",
            title="2,000 of SST-2, LoRA on MiniLM's last layer",
            load=_load_lora,
            num_classes=2,
            num_steps=20,
            expected_batch_size=60,
            delta=2.5e-4,
            middle_rate=0.02,
            budgets=(0.1, 1.0, 16.0),
            claims=(1.0,),
            ratios=(1.0, 10.0, 100.0),
            scope="full",
            num_seeds=5,
            ingredients_at=1.0,
        ),
        Workload(
            name="cifar100-linear",
            title="CIFAR-100, logistic regression",
            load=_load_cifar100,
            num_classes=100,
            num_steps=250,
            expected_batch_size=1000,
            delta=5e-6,
            middle_rate=0.002,
            budgets=(0.1, 0.5, 1.0, 8.0),
            num_seeds=5,
        ),
    )
}
