"""Models spread over ranks by `fully_shard`, and their tensors made whole again."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


def shard(model: nn.Module, **options: Any) -> nn.Module:
    """Every block of a Transformer on its own, and the rest of the model with its root."""
    for module in [*model.modules()]:
        if isinstance(module, nn.ModuleList):
            for block in module:
                fully_shard(block, **options)
    return fully_shard(model, **options)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor, wherever its rows lie; collective."""
    found = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return found.detach().clone()
