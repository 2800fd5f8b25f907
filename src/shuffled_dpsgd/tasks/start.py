"""From a configuration to a private run: the device, the optimizer, and the sections as options."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from shuffled_dpsgd.distributed import World
from shuffled_dpsgd.distributed.agreement import agree
from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.options import PrivacyOptions, options_in
from shuffled_dpsgd.tasks.config import OptimizerConfig, RunConfig
from shuffled_dpsgd.training import assemble
from shuffled_dpsgd.training.private import PrivateTraining
from shuffled_dpsgd.training.units import Units

# Keys that may differ between machines; the contents of the folders are compared once loaded.
_OF_A_MACHINE = ("data.path", "model.name", "training.device", "training.num_threads")


def start_private(
    config: RunConfig,
    model: nn.Module,
    *,
    dataset_size: int,
    ledger_path: Path | None = None,
    units: Units | None = None,
) -> PrivateTraining:
    """Move `model` to the configured device, build its optimizer and calibrate its noise.

    `units` says whose the records are, where several of a unit may take part.
    """
    if config.privacy.records_per_unit and units is None:
        raise InvalidArgumentError(
            "privacy.records_per_unit",
            expected="nothing for this task or audit, whose records are units of their own",
            got=config.privacy.records_per_unit,
            remedy='task = "text-classification" reads whose a record is, and make_private takes '
            "it for any loop of yours",
        )
    model.to(chosen_device(config.training.device))
    options = PrivacyOptions(
        **options_in(config.privacy),
        **options_in(config.training),
        dataset_size=dataset_size,
        seed=config.seed,
        ledger_path=ledger_path,
    )
    config.optimizer.check_length(options.steps())
    private = assemble(model, build_optimizer(model, config.optimizer), options)
    private.units = units
    private.history.tells = False  # Commands that start several runs say so themselves.
    return private


def chosen_device(name: str) -> torch.device:
    """The device a configuration names; `auto` is the GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
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


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """One parameter group over everything trainable."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    rate, decay = config.learning_rate, config.weight_decay
    if config.name == "sgd":
        return torch.optim.SGD(parameters, lr=rate, momentum=config.momentum, weight_decay=decay)
    kind = torch.optim.AdamW if config.name == "adamw" else torch.optim.Adam
    # The fused kernel makes a single pass over memory.
    return kind(parameters, lr=rate, weight_decay=decay, fused=True)


def build_scheduler(
    optimizer: torch.optim.Optimizer, config: OptimizerConfig, num_steps: int
) -> torch.optim.lr_scheduler.LambdaLR:
    """Warm-up, then constant, or linear or cosine decay to zero at `num_steps`."""
    config.check_length(num_steps)
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: config.factor_at(step, num_steps)
    )


def compare_configs(world: World, config: RunConfig) -> None:
    """Refuse a launch whose ranks have different settings, naming the rank and the key.

    Asked before anything is loaded. The seed is secret, and is compared as part of the plan.
    """
    facts: dict[str, object] = {}
    for section, value in config.without_seed().items():
        named = value if isinstance(value, dict) else {"": value}
        facts |= {f"{section}.{key}".rstrip("."): setting for key, setting in named.items()}
    compared = {key: facts[key] for key in sorted(facts.keys() - {*_OF_A_MACHINE})}
    agree(world, compared, remedy="start every rank with the same file and the same arguments")
