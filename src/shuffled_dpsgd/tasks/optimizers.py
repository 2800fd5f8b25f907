"""Optimizer and learning-rate schedule from their configuration."""

from __future__ import annotations

import math

import torch
from torch import nn

from shuffled_dpsgd.tasks.config import OptimizerConfig


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """One parameter group over everything trainable."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    rate, decay = config.learning_rate, config.weight_decay
    if config.name == "sgd":
        return torch.optim.SGD(parameters, lr=rate, momentum=config.momentum, weight_decay=decay)
    kind = torch.optim.AdamW if config.name == "adamw" else torch.optim.Adam
    # One pass over memory, where the default takes one per operation.
    return kind(parameters, lr=rate, weight_decay=decay, fused=True)


def build_scheduler(
    optimizer: torch.optim.Optimizer, config: OptimizerConfig, num_steps: int
) -> torch.optim.lr_scheduler.LambdaLR:
    """Warm-up, then constant, or linear or cosine decay to zero at `num_steps`.

    Raises:
        InvalidArgumentError: the warm-up takes more than `num_steps`.
    """
    config.check_length(num_steps)

    def factor(step: int) -> float:
        return learning_rate_factor(step, config, num_steps)

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def learning_rate_factor(step: int, config: OptimizerConfig, num_steps: int) -> float:
    """What the learning rate is multiplied with at `step`, counted from zero.

    >>> config = OptimizerConfig(schedule="linear", warmup_steps=2)
    >>> [learning_rate_factor(step, config, 6) for step in range(7)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    """
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return 1.0
    done = (step - config.warmup_steps) / max(num_steps - config.warmup_steps, 1)
    if config.schedule == "linear":
        return max(0.0, 1.0 - done)
    return 0.5 * (1.0 + math.cos(math.pi * min(done, 1.0)))
