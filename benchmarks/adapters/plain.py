"""Non-private training: the mean loss, backward, AdamW."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.adapters import Setting, Step
from benchmarks.adapters.sharding import shard
from benchmarks.workloads import Batch


def plain_step(model: nn.Module, setting: Setting, *, variant: str) -> Step:
    """A step of ordinary training; `compiled` as one graph, `sharded` on one rank, or as it is."""
    if variant == "sharded":
        shard(model, setting.device)
    optimizer = setting.optimizer(model)
    losses = setting.workload.losses
    if variant == "compiled":
        losses = torch.compile(losses, fullgraph=True)

    def step(batch: Batch) -> None:
        with setting.autocast():
            loss = losses(model, batch).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step
