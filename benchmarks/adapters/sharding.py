"""A model under `fully_shard` in a process group of this process alone."""

from __future__ import annotations

import socket

import torch
import torch.distributed as dist
from torch import nn


def shard(model: nn.Module, device: torch.device) -> None:
    """Shard every block of a Transformer, then the rest with the model."""
    from torch.distributed.fsdp import fully_shard

    if not dist.is_initialized():
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            init_method=f"tcp://127.0.0.1:{port}",
            rank=0,
            world_size=1,
        )
    for module in [*model.modules()]:
        if isinstance(module, nn.ModuleList):
            for block in module:
                fully_shard(block)
    fully_shard(model)
