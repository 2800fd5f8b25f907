"""What these audits attack: runs by seed and shuffle, and small models on digits."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import nn
from torch.utils.data import Subset

from shuffled_dpsgd.auditing.run import AuditTarget
from shuffled_dpsgd.auditing.taps import OnProgress
from shuffled_dpsgd.auditing.verdict import AuditReport
from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.tasks import digits
from shuffled_dpsgd.tasks.audited import prepared_task, target_of
from shuffled_dpsgd.tasks.config import RunConfig
from shuffled_dpsgd.tasks.start import start_private
from shuffled_dpsgd.training import make_private
from shuffled_dpsgd.training.private import PrivateTraining
from shuffled_dpsgd_experiments.audits.black_box import Start
from shuffled_dpsgd_experiments.audits.paper_audit import PaperSetting, paper_audit
from shuffled_dpsgd_experiments.audits.paper_training import TrainingSetting, audit_paper_training

HIDDEN = 64


def starts_of(config: RunConfig, initial: nn.Module) -> Start:
    """Fresh runs from the same initial weights, by data set size, seed and changed options."""

    def start(dataset_size: int, seed: int, changes: Mapping[str, Any]) -> PrivateTraining:
        chosen = replace(config, seed=seed, privacy=replace(config.privacy, **changes))
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


def black_box_target(
    config: RunConfig | None, *, noise_multiplier: float | None, num_steps: int | None
) -> tuple[Start, AuditTarget]:
    """Runs of a file's task; without a file, of the digits ViT on the first 200 digits."""
    if config is None:
        start = small_vit_runs(
            noise_multiplier=0.1 if noise_multiplier is None else noise_multiplier,
            num_steps=num_steps or 60,
            expected_batch_size=100,
        )
        records = digits_records(200)
        target = AuditTarget(
            start=lambda size: start(size, 0, {}), data=records, losses=cross_entropies
        )
        return start, target
    if config.privacy.budget is not None:
        raise InvalidArgumentError(
            "budget",
            expected="none for an audit of the black box",
            got=config.privacy.budget,
            remedy="it shows losses of records, which carry no noise, so no budget covers it",
        )
    task = prepared_task(config)
    return starts_of(config, task.model), target_of(config, task)


def small_vit_runs(*, noise_multiplier: float, num_steps: int, expected_batch_size: int) -> Start:
    """Runs of the digits ViT by (data set size, seed, changed options), AdamW."""

    def start(dataset_size: int, seed: int, changes: Mapping[str, Any]) -> PrivateTraining:
        model = digits.build_model()
        options = {"noise_multiplier": noise_multiplier, "clip_norm": 1.0, **changes}
        return make_private(
            model,
            torch.optim.AdamW(model.parameters(), lr=1e-2),
            dataset_size=dataset_size,
            expected_batch_size=expected_batch_size,
            num_steps=num_steps,
            delta=1e-4,
            seed=seed,
            **options,
        )

    return start


def digits_records(count: int) -> Subset[Any]:
    """The first `count` training digits."""
    train, _ = digits.load_digits()
    return Subset(train, range(count))


def audit_the_paper(
    setting: PaperSetting,
    epsilons: tuple[float, ...],
    *,
    training_steps: int,
    on_progress: OnProgress | None = None,
) -> tuple[dict[str, Any], list[AuditReport]]:
    """Table 6 repeated, as plain data, and the same audit inside one training run per claim."""
    if 0 < training_steps < 100:
        raise InvalidArgumentError(
            "--training-steps", expected="0, or at least 100", got=training_steps
        )
    rows = paper_audit(setting, epsilons)
    trained = [
        audit_paper_training(
            long_run_target(
                epsilon=epsilon,
                num_steps=training_steps,
                batch_clip=setting.batch_clip,
                seed=setting.seed,
            ),
            TrainingSetting(num_observations=min(200, training_steps // 2), seed=setting.seed),
            on_progress=on_progress,
        )
        for epsilon in epsilons * (training_steps > 0)
    ]
    found = {"setting": asdict(setting), "rows": rows, "training": [r.to_json() for r in trained]}
    return found, trained
