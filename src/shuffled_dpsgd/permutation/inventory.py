"""Which tensors move with a model, and by which route.

Looking at every parameter and every state tensor takes longer than moving them does on a GPU. So
what was found is kept, and used again as long as the model and the optimizer hold the very same
tensors at the same addresses; otherwise everything is looked at anew.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import nn

from shuffled_dpsgd.errors import InvalidArgumentError, UnsupportedModuleError
from shuffled_dpsgd.permutation import fused
from shuffled_dpsgd.permutation.spec import PermutationSpec

Named = tuple[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Inventory:
    """Tensors that move: those the fused kernels take, and the others by device and dtype."""

    together: tuple[fused.Prepared, ...]
    apart: Mapping[tuple[torch.device, torch.dtype], Sequence[Named]]


@dataclass(frozen=True, kw_only=True)
class _Kept:
    """An inventory with all it was made from.

    Its objects may be the same and yet differ: a parameter's `.data` may have been replaced, by a
    view of the same memory even.
    """

    objects: list[object]
    parameters: Sequence[torch.Tensor]
    tensors: list[torch.Tensor]
    views: list[object]
    inventory: Inventory

    def holds(self, objects: list[object]) -> bool:
        """Whether an inventory made from `objects` now would be this one."""
        return (
            len(objects) == len(self.objects)
            and all(map(operator.is_, objects, self.objects))
            and _views(self.parameters, self.tensors) == self.views
        )


def take_inventory(
    spec: PermutationSpec, model: nn.Module, optimizer: torch.optim.Optimizer | None
) -> Inventory:
    """What moves with the model and the optimizer, checked; nothing has moved if this raises."""
    owner = model if optimizer is None else optimizer
    cache: WeakKeyDictionary[object, _Kept] = spec.derived["inventory"].setdefault(
        "by owner", WeakKeyDictionary()
    )
    objects = _held(model, optimizer)
    kept = cache.get(owner)
    if kept is not None and kept.holds(objects):
        return kept.inventory
    cache.pop(owner, None)
    moving = _moving(spec, model, optimizer)
    inventory = sort_out(spec, moving)
    tensors = [tensor for _, tensor in moving]
    # Gradients come and go with every step: to hold them would keep their memory.
    parameters = [*model.parameters()]
    if not inventory.apart and all(parameter.grad is None for parameter in parameters):
        cache[owner] = _Kept(
            objects=objects,
            parameters=parameters,
            tensors=tensors,
            views=_views(parameters, tensors),
            inventory=inventory,
        )
    return inventory


def _views(parameters: Sequence[torch.Tensor], tensors: list[torch.Tensor]) -> list[object]:
    return [
        *map(torch.Tensor.size, parameters),
        *map(torch.Tensor.stride, parameters),
        *map(torch.Tensor.data_ptr, tensors),
    ]


def sort_out(spec: PermutationSpec, moving: Sequence[Named]) -> Inventory:
    """Choose the route of every tensor; refuse those that have none."""
    together: dict[tuple[torch.device, int], list[Named]] = {}
    apart: dict[tuple[torch.device, torch.dtype], list[Named]] = {}
    for name, tensor in moving:
        if fused.can_move(spec, name, tensor):
            together.setdefault((tensor.device, tensor.element_size()), []).append((name, tensor))
        else:
            _check_movable(name, tensor)
            apart.setdefault((tensor.device, tensor.dtype), []).append((name, tensor))
    return Inventory(
        together=tuple(fused.prepare(spec, tensors) for tensors in together.values()), apart=apart
    )


def _held(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> list[object]:
    """Parameters, gradients and optimizer state as they are now, by identity and in order."""
    modules = [model]
    seen = {model}
    found: list[object] = []
    for module in modules:  # grows while it is walked
        for child in module._modules.values():
            if child is not None and child not in seen:
                seen.add(child)
                modules.append(child)
        for parameter in module._parameters.values():
            if parameter is not None:
                found += (parameter, parameter.grad)
    if optimizer is not None:
        for owner, state in optimizer.state.items():
            found.append(owner)
            found += state.values()
    return found


def _moving(
    spec: PermutationSpec, model: nn.Module, optimizer: torch.optim.Optimizer | None
) -> list[Named]:
    parameters = dict(model.named_parameters())
    check_model(spec, parameters)
    moving: list[Named] = []
    for name in spec.axes_of:
        parameter = parameters[name]
        moving.append((name, parameter))
        if parameter.grad is not None:
            moving.append((name, parameter.grad))
    if optimizer is not None:
        moving += optimizer_tensors(spec, parameters, optimizer)
    return moving


def check_model(spec: PermutationSpec, parameters: Mapping[str, torch.Tensor]) -> None:
    """Refuse a model whose parameters are not those the spec was made from."""
    found = {name: tuple(p.shape) for name, p in parameters.items()}
    if found != dict(spec.shapes):
        differing = sorted(
            name for name in found.keys() | spec.shapes if found.get(name) != spec.shapes.get(name)
        )
        raise InvalidArgumentError(
            "model",
            expected="the parameters the spec was discovered from",
            got=f"a difference in {', '.join(differing[:3])}",
            remedy="call discover on this model",
        )


def optimizer_tensors(
    spec: PermutationSpec,
    parameters: Mapping[str, torch.Tensor],
    optimizer: torch.optim.Optimizer,
) -> list[tuple[str, torch.Tensor]]:
    """Every optimizer state tensor that moves, with the name of its parameter."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    found: list[tuple[str, torch.Tensor]] = []
    for parameter, state in optimizer.state.items():
        name = names.get(id(parameter))
        if name is None or name not in spec.axes_of:
            continue
        shape = parameter.shape
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                if value.shape == shape:
                    found.append((name, value))
                elif value.ndim > 0 and value.numel() > 1:
                    raise _unknown_state(name, key, f"shape {tuple(value.shape)}")
            elif isinstance(value, list | tuple | dict):
                raise _unknown_state(name, key, type(value).__name__)
    return found


def _unknown_state(name: str, key: str, got: str) -> UnsupportedModuleError:
    return UnsupportedModuleError(
        f"optimizer.state[{name}][{key}]",
        expected="state of the parameter's shape, or a scalar",
        got=got,
        remedy="use an optimizer that works entry by entry, such as SGD or AdamW",
    )


def _check_movable(name: str, tensor: torch.Tensor) -> None:
    if tensor.is_meta:
        raise InvalidArgumentError(
            name,
            expected="a tensor with data",
            got="a tensor on the meta device",
            remedy="load or initialise the weights first",
        )
    if tensor.layout != torch.strided or type(tensor).__name__ == "DTensor":
        raise UnsupportedModuleError(
            name,
            expected="a dense tensor held by one process",
            got=f"{type(tensor).__name__} of layout {tensor.layout}",
            remedy="gather it first",
        )
