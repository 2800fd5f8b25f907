"""From a configuration to a private run: the one place where a config meets `make_private`."""

from __future__ import annotations

from pathlib import Path

import torch

from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.tasks.config import RunConfig
from shuffled_dpsgd.tasks.optimizers import build_optimizer
from shuffled_dpsgd.training import make_private
from shuffled_dpsgd.training.private import PrivateTraining


def start_private(
    config: RunConfig,
    model: torch.nn.Module,
    *,
    dataset_size: int,
    ledger_path: Path | None = None,
) -> PrivateTraining:
    """Move `model` to the configured device, build its optimizer and calibrate its noise."""
    model.to(chosen_device(config.training.device))
    privacy, training = config.privacy, config.training
    return make_private(
        model,
        build_optimizer(model, config.optimizer),
        dataset_size=dataset_size,
        expected_batch_size=training.expected_batch_size,
        epochs=training.epochs,
        num_steps=training.num_steps,
        epsilon=privacy.epsilon,
        noise_multiplier=privacy.noise_multiplier,
        unshuffled_noise_multiplier=privacy.unshuffled_noise_multiplier,
        delta=privacy.delta,
        clip_norm=privacy.clip_norm,
        batch_clip_norm=privacy.batch_clip_norm,
        accounting=privacy.accounting,
        shuffle=privacy.shuffle,
        scope=privacy.scope,
        seed=config.seed,
        physical_batch_size=training.physical_batch_size,
        ledger_path=ledger_path,
    )


def chosen_device(name: str) -> torch.device:
    """The device a configuration names; `auto` is the GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise InvalidArgumentError(
            "training.device", expected="auto, cpu or cuda", got=name
        ) from error
