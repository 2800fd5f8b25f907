"""What these audits attack: runs by seed and shuffle, and small models on digits."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils.data import Subset

from shuffled_dpsgd.auditing.probes import OnProgress
from shuffled_dpsgd.auditing.run import AuditTarget
from shuffled_dpsgd.auditing.verdict import AuditReport
from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.options import NoiseFrame, Shuffle
from shuffled_dpsgd.tasks import digits
from shuffled_dpsgd.tasks.config import RunConfig
from shuffled_dpsgd.tasks.start import start_private
from shuffled_dpsgd.training import make_private
from shuffled_dpsgd.training.private import PrivateTraining
from shuffled_dpsgd_experiments.audits.black_box import Start
from shuffled_dpsgd_experiments.audits.paper_training import TrainingSetting, audit_paper_training

HIDDEN = 64


def starts_of(config: RunConfig, initial: nn.Module) -> Start:
    """Fresh runs from the same initial weights, by data set size, seed, shuffle and noise frame."""

    def start(
        dataset_size: int, seed: int, shuffle: Shuffle, noise_frame: NoiseFrame
    ) -> PrivateTraining:
        privacy = replace(config.privacy, shuffle=shuffle, noise_frame=noise_frame)
        chosen = replace(config, seed=seed, privacy=privacy)
        return start_private(chosen, copy.deepcopy(initial), dataset_size=dataset_size)

    return start


def cross_entropies(model: nn.Module, batch: Any) -> torch.Tensor:
    """One loss per image, for models that return logits, plain or in a record."""
    found = model(batch[0])
    logits = found if isinstance(found, torch.Tensor) else found.logits
    return nn.functional.cross_entropy(logits, batch[1], reduction="none")


def small_network(seed: int) -> nn.Module:
    """64 pixels, one hidden layer of `HIDDEN` units, ten classes: the paper's Theorem 1, alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 10))


def long_run_target(
    *, epsilon: float, num_steps: int, batch_clip: float, seed: int, expected_batch_size: int = 16
) -> AuditTarget:
    """A network small enough for ten thousand steps, on digits, at the paper's own calibration."""
    train, _ = digits.load_digits()

    def start(dataset_size: int) -> PrivateTraining:
        model = small_network(seed)
        return make_private(
            model,
            torch.optim.SGD(model.parameters(), lr=0.05),
            dataset_size=dataset_size,
            expected_batch_size=expected_batch_size,
            num_steps=num_steps,
            epsilon=epsilon,
            delta=1e-4,
            clip_norm=1.0,
            batch_clip_norm=batch_clip,
            accounting="paper",
            shuffle="every-step",
            seed=seed,
        )

    return AuditTarget(start=start, data=train, losses=cross_entropies)


def small_vit_runs(*, noise_multiplier: float, num_steps: int, expected_batch_size: int) -> Start:
    """Runs of the digits ViT by (data set size, seed, shuffle, noise frame), AdamW."""

    def start(
        dataset_size: int, seed: int, shuffle: Shuffle, noise_frame: NoiseFrame
    ) -> PrivateTraining:
        model = digits.build_model()
        return make_private(
            model,
            torch.optim.AdamW(model.parameters(), lr=1e-2),
            dataset_size=dataset_size,
            expected_batch_size=expected_batch_size,
            num_steps=num_steps,
            noise_multiplier=noise_multiplier,
            delta=1e-4,
            clip_norm=1.0,
            shuffle=shuffle,
            noise_frame=noise_frame,
            seed=seed,
        )

    return start


def digits_records(count: int) -> Subset[Any]:
    """The first `count` training digits."""
    train, _ = digits.load_digits()
    return Subset(train, range(count))


def watch_training(
    epsilons: tuple[float, ...],
    num_steps: int,
    batch_clip: float,
    seed: int,
    on_progress: OnProgress | None,
) -> list[AuditReport]:
    """The paper's audit inside one training run per claim; none for no steps."""
    if num_steps == 0:
        return []
    if num_steps < 100:
        raise InvalidArgumentError("--training-steps", expected="0, or at least 100", got=num_steps)
    return [
        audit_paper_training(
            long_run_target(epsilon=epsilon, num_steps=num_steps, batch_clip=batch_clip, seed=seed),
            TrainingSetting(num_observations=min(200, num_steps // 2), seed=seed),
            on_progress=on_progress,
        )
        for epsilon in epsilons
    ]
