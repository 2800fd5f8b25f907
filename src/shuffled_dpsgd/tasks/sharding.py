"""Sharding a task's model over ranks, and gathering it again to be saved."""

from __future__ import annotations

import os
import secrets

import torch
from torch import nn

from shuffled_dpsgd.distributed import World
from shuffled_dpsgd.distributed.agreement import agree
from shuffled_dpsgd.distributed.layouts import gather_whole
from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.training.data import MapStyle
from shuffled_dpsgd.training.record_digest import digest


def compare_data(world: World, data: MapStyle) -> None:
    """Refuse a launch whose ranks have loaded different records, naming the rank."""
    if world.size > 1:
        salt = world.from_first(secrets.token_bytes(32))
        facts = {
            "number of training records": len(data),
            "set of training records": digest(data, salt),
        }
        agree(world, facts, remedy="give every rank the same files")


def shard_model(
    model: nn.Module, world: World, device: torch.device, *, a_copy_per_node: bool = False
) -> None:
    """Shard a model over all ranks by FSDP: each module of a `ModuleList`, then the rest.

    They are moved to the device one by one, so that no device ever has the whole model. With
    `a_copy_per_node` it is spread over the ranks of a node, as many as torchrun says.
    """
    sharers = int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if a_copy_per_node else world.size
    copies, rest = divmod(world.size, sharers)
    if sharers == 1 or rest or (a_copy_per_node and copies == 1):
        raise InvalidArgumentError(
            "training.sharding",
            expected="'replicated' for one process; 'hybrid' on several nodes of as many ranks",
            got=f"{sharers} of {world.size} ranks to share a model",
            remedy="start the command with torchrun --nproc-per-node 2 or more",
        )
    # torch.distributed.fsdp takes a while to import.
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    axes = {"copies": copies, "shards": sharers} if a_copy_per_node else {"shards": sharers}
    mesh = init_device_mesh(device.type, (*axes.values(),), mesh_dim_names=(*axes,))
    for module in [*model.modules()]:
        if isinstance(module, nn.ModuleList):
            for block in module:
                fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


@torch.no_grad()
def fill_whole(world: World, whole: nn.Module | None, sharded: nn.Module) -> None:
    """Copy a sharded model into a whole one, on the ranks that have one. Collective."""
    for name, parameter in sharded.named_parameters():
        found = gather_whole(world, parameter)
        if whole is not None:
            whole.get_parameter(name).copy_(found)
    if whole is not None:
        for name, buffer in sharded.named_buffers():
            whole.get_buffer(name).copy_(buffer)


def has_room(whole: nn.Module, device: torch.device) -> bool:
    """Whether the device has free memory for one and a half times the whole model."""
    if device.type != "cuda":
        return True
    free, _ = torch.cuda.mem_get_info(device)
    return 1.5 * sum(parameter.nbytes for parameter in whole.parameters()) < free
