"""A task's model spread over the ranks of a launch, and made whole again to be saved."""

from __future__ import annotations

import torch
from torch import nn

from shuffled_dpsgd.distributed import World
from shuffled_dpsgd.distributed.layouts import gather_whole
from shuffled_dpsgd.errors import InvalidArgumentError


def shard_model(model: nn.Module, world: World, device: torch.device) -> None:
    """Spread a model over all ranks: every block by itself, the rest with the root.

    Blocks are what lists of modules hold; each is gathered when it runs. FSDP moves them to the
    device one by one, so that no device ever has the whole model.

    Raises:
        InvalidArgumentError: there are no ranks to spread it over.
    """
    if world.size == 1:
        raise InvalidArgumentError(
            "training.sharding",
            expected="'replicated' for one process",
            got="sharded",
            remedy="start the command with torchrun --nproc-per-node 2 or more",
        )
    # torch.distributed.fsdp takes a while to import.
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (world.size,))
    for module in [*model.modules()]:
        if isinstance(module, nn.ModuleList):
            for block in module:
                fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


@torch.no_grad()
def fill_whole(world: World, whole: nn.Module | None, sharded: nn.Module) -> None:
    """Copy a sharded model into a whole one, on the ranks that have one. Collective.

    One parameter is gathered at a time.
    """
    targets = {} if whole is None else dict(whole.named_parameters())
    for name, parameter in sharded.named_parameters():
        found = gather_whole(world, parameter)
        if whole is not None:
            targets[name].copy_(found)
    buffers = {} if whole is None else dict(whole.named_buffers())
    for name, buffer in sharded.named_buffers():
        if name in buffers:
            buffers[name].copy_(buffer)


def has_room(whole: nn.Module, device: torch.device) -> bool:
    """Whether a whole model fits beside what a device holds, with half of it again to run it."""
    if device.type != "cuda":
        return True
    free, _ = torch.cuda.mem_get_info(device)
    return 1.5 * sum(parameter.nbytes for parameter in whole.parameters()) < free
