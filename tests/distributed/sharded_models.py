"""Models spread over ranks by `fully_shard`, and their tensors made whole again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from shuffled_dpsgd.distributed import current_world


def two_by_two() -> DeviceMesh:
    """Two copies of a model, each spread over two ranks."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))


def shard(model: nn.Module, **options: Any) -> nn.Module:
    """Every block of a Transformer on its own, and the rest of the model with its root."""
    for module in [*model.modules()]:
        if isinstance(module, nn.ModuleList):
            for block in module:
                fully_shard(block, **options)
    return fully_shard(model, **options)


def spread(make: Callable[[], nn.Module], how: bool | str) -> Callable[[], nn.Module]:
    """A model that is spread over all ranks, "2x2": two copies, each over two ranks, "state":
    whole on every rank while it computes, so that they share little but the optimizer's state, or
    "split": an MLP of which every rank has some hidden units."""

    def spread_out() -> nn.Module:
        if how == "split":
            return split(make(), {"0": ColwiseParallel(), "2": RowwiseParallel()})
        if how == "state":
            return fully_shard(make())
        return shard(make(), **({"mesh": two_by_two()} if how == "2x2" else {}))

    return spread_out


def split(model: nn.Module, plan: dict[str, ParallelStyle]) -> nn.Module:
    """Linear layers split over all ranks."""
    mesh = init_device_mesh("cpu", (current_world().size,), mesh_dim_names=("tp",))
    return parallelize_module(model, mesh, plan)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor, wherever its rows lie; collective."""
    found = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return found.detach().clone()
