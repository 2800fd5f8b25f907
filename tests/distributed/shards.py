"""What ranks with a shard of the model each do in the tests; run by `nursery.py`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from distributed.replicas import CASES, refusal
from shuffled_dpsgd.permutation import apply, discover, draw
from shuffled_dpsgd.training import PrivateTraining, make_private
from training.cases import RECORDS


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


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Weights, and moments under the names of their parameters; collective."""
    found = {name: whole(p) for name, p in model.named_parameters()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor) and value.dim():
                found[f"{name}.{key}"] = whole(value)
    return found


def with_moments(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer whose moments differ from coordinate to coordinate, as on any rank."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for index, parameter in enumerate(model.parameters()):
        generator = torch.Generator().manual_seed(index)
        grad = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        if isinstance(parameter, DTensor):
            mesh, placements = parameter.device_mesh, parameter.placements
            grad = dist.tensor.distribute_tensor(grad, mesh, placements)
        parameter.grad = grad
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


@contextmanager
def nothing_gathered() -> Iterator[None]:
    """Only an all-to-all may carry weights."""
    forbidden = ("all_gather_into_tensor", "all_gather", "all_reduce", "broadcast")
    with mock.patch.multiple(dist, **dict.fromkeys(forbidden, _refuse)):
        yield


def _refuse(*_: Any, **__: Any) -> None:
    raise AssertionError("a collective that the shuffle has no need of")


def shuffled(name: str, scope: str) -> dict[str, bool]:
    """A shuffle of shards beside one of whole tensors: the same bits, and back again."""
    torch.manual_seed(0)
    plain, model = CASES[name](torch.float32).make(), CASES[name](torch.float32).make()
    spec = discover(plain, scope=scope)  # type: ignore[arg-type]
    permutation = draw(spec, torch.Generator().manual_seed(5))
    plain_optimizer = with_moments(plain)
    optimizer = with_moments(shard(model))
    before = everything(model, optimizer)
    same_start = _equal(before, everything(plain, plain_optimizer))
    apply(permutation, plain, plain_optimizer)
    with nothing_gathered():
        apply(permutation, model, optimizer)
    after = everything(model, optimizer)
    with nothing_gathered():
        apply(permutation.inverse(), model, optimizer)
    return {
        "same start": same_start,
        "same end": _equal(after, everything(plain, plain_optimizer)),
        "moved": not _equal(before, after),
        "moments": any(name.endswith("exp_avg_sq") for name in after),
        "back": _equal(before, everything(model, optimizer)),
    }


def _equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


def start(model: nn.Module, **changes: Any) -> PrivateTraining:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    options: dict[str, Any] = {
        "dataset_size": RECORDS,
        "expected_batch_size": 8,
        "num_steps": 2,
        "noise_multiplier": 0.5,
        "delta": 1e-4,
        "seed": 3,
        "physical_batch_size": 4,
        **changes,
    }
    return make_private(model, optimizer, **options)


def refusals() -> dict[str, str]:
    """What cannot be trained is refused by name, on every rank alike."""
    return {"sharded": refusal(lambda: start(shard(CASES["bert"](torch.float32).make())))}
