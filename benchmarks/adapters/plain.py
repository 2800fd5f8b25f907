"""Non-private training: the mean loss, backward, AdamW."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.adapters import Setting, Step
from benchmarks.workloads import Batch


def plain_step(model: nn.Module, setting: Setting, *, compiled: bool) -> Step:
    """A step of ordinary training, its forward and losses compiled as one graph if asked."""
    optimizer = setting.optimizer(model)
    losses = setting.workload.losses
    if compiled:
        losses = torch.compile(losses, fullgraph=True)

    def step(batch: Batch) -> None:
        with setting.autocast():
            loss = losses(model, batch).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step
