"""From a configuration to a private run: the one place where a file's sections become options."""

from __future__ import annotations

from pathlib import Path

import torch

from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.options import PrivacyOptions, options_in
from shuffled_dpsgd.tasks.config import RunConfig
from shuffled_dpsgd.tasks.optimizers import build_optimizer
from shuffled_dpsgd.training import assemble
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
    options = PrivacyOptions(
        **options_in(config.privacy),
        **options_in(config.training),
        dataset_size=dataset_size,
        seed=config.seed,
        ledger_path=ledger_path,
    )
    config.optimizer.check_length(options.steps())
    return assemble(model, build_optimizer(model, config.optimizer), options)


def chosen_device(name: str) -> torch.device:
    """The device a configuration names; `auto` is the GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InvalidArgumentError(
            "training.device", expected="auto, cpu or cuda", got=name
        ) from error
    if device.type not in ("cpu", "cuda"):
        raise InvalidArgumentError("training.device", expected="auto, cpu or cuda", got=name)
    number = torch.cuda.device_count() if device.type == "cuda" else 1
    if (device.index or 0) >= number:
        raise InvalidArgumentError(
            "training.device",
            expected=f"one of {number} CUDA devices" if number else "a CUDA device to be there",
            got=name,
            remedy="use auto or cpu, or install PyTorch for CUDA and check nvidia-smi",
        )
    return device
