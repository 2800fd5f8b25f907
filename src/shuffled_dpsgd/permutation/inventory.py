"""Which tensors move with a model, and how each is moved.

To look at every parameter and every state tensor takes longer than to move them does in a small
model or on a GPU. So what was found is kept, and used again as long as model and optimizer hold the
very same tensors with the same dtypes and addresses; otherwise everything is looked at anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from operator import attrgetter, is_
from weakref import WeakKeyDictionary

import torch
from torch import nn

from shuffled_dpsgd.errors import InvalidArgumentError, UnsupportedModuleError
from shuffled_dpsgd.permutation import gpu
from shuffled_dpsgd.permutation.spec import PermutationSpec
from shuffled_dpsgd.runtime.shards import all_held, mesh_of
from shuffled_dpsgd.runtime.structure import Structure, same_objects

Named = tuple[str, torch.Tensor]
WithAxes = tuple[torch.Tensor, Sequence[tuple[int, int]]]


@dataclass(frozen=True, kw_only=True)
class Inventory:
    """Tensors that move: those the GPU's kernels take, and the others by device and dtype.

    The others come with their moving axes, each with its place in the spec's layouts. `sharded`
    are tensors whose rows lie on several ranks, by parameter.
    """

    tables: tuple[gpu.Table, ...]
    apart: Mapping[tuple[torch.device, torch.dtype], Sequence[WithAxes]]
    sharded: Sequence[Named] = ()


@dataclass(frozen=True, kw_only=True)
class _Kept:
    """An inventory with all it was made from.

    Its objects may be the same and yet differ: a parameter's `.data` may have been replaced, by a
    view of the same memory even, or by another dtype at an address used before. `tensors` are what
    this process holds of the `sources`, the tensors that move.
    """

    structure: Structure
    state: list[object]
    parameters: Sequence[torch.Tensor]
    sources: Sequence[torch.Tensor]
    tensors: Sequence[torch.Tensor]
    views: list[object]
    inventory: Inventory

    def holds(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> bool:
        """Whether an inventory made now would be this one."""
        return (
            self.structure.fits(model)
            and same_objects(_state(optimizer), self.state)
            and _no_gradients(self.parameters)
            and same_objects(all_held(self.sources), self.tensors)
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
    kept = cache.get(owner)
    if kept is not None and kept.holds(model, optimizer):
        return kept.inventory
    cache.pop(owner, None)
    moving = _moving(spec, model, optimizer)
    inventory = sort_out(spec, moving)
    # Gradients come and go with every step: to hold them would keep their memory.
    parameters = [*model.parameters()]
    if not inventory.sharded and _no_gradients(parameters):
        sources = [tensor for _, tensor in moving]
        tensors = all_held(sources)
        cache[owner] = _Kept(
            structure=Structure(model),
            state=_state(optimizer),
            parameters=parameters,
            sources=sources,
            tensors=tensors,
            views=_views(parameters, tensors),
            inventory=inventory,
        )
    return inventory


# Looked at before every move: each kind of object once, and in C.
_gradient = attrgetter("grad")
_dtype = attrgetter("dtype")
_shape = attrgetter("shape")


def _state(optimizer: torch.optim.Optimizer | None) -> list[object]:
    """The optimizer's state as it is now, by identity and in order."""
    if optimizer is None:
        return []
    values = chain.from_iterable(map(dict.values, optimizer.state.values()))
    return [*optimizer.state, *values]


def _no_gradients(parameters: Sequence[torch.Tensor]) -> bool:
    return all(map(is_, map(_gradient, parameters), repeat(None)))


def _views(parameters: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> list[object]:
    """Where the tensors lie and how; one address space holds the memory of all devices."""
    return [
        *map(torch.Tensor.data_ptr, tensors),
        *map(_dtype, tensors),
        *map(torch.Tensor.is_contiguous, tensors),
        *map(_shape, parameters),
    ]


def sort_out(spec: PermutationSpec, moving: Sequence[Named]) -> Inventory:
    """Choose how each tensor is moved; refuse those that cannot be."""
    parts = all_held([tensor for _, tensor in moving])
    _refuse_shared_memory([name for name, _ in moving], parts)
    together: dict[tuple[torch.device, int], list[Named]] = {}
    apart: dict[tuple[torch.device, torch.dtype], list[WithAxes]] = {}
    sharded: dict[str, list[Named]] = {}
    for (name, source), tensor in zip(moving, parts, strict=True):
        if tensor is not source and not _is_whole(name, source):
            sharded.setdefault(name, []).append((name, source))
        elif gpu.can_move(spec, name, tensor):
            together.setdefault((tensor.device, tensor.element_size()), []).append((name, tensor))
        else:
            _check_movable(name, tensor)
            with_axes = (tensor, spec.axes_of[name])
            apart.setdefault((tensor.device, tensor.dtype), []).append(with_axes)
    return Inventory(
        tables=tuple(gpu.prepare(spec, tensors) for tensors in together.values()),
        apart=apart,
        sharded=[named for tensors in sharded.values() for named in tensors],
    )


def _is_whole(name: str, tensor: torch.Tensor) -> bool:
    """Whether a sharded tensor lies on a single rank after all; refuses all but rows in order."""
    placements = tensor.placements  # type: ignore[attr-defined]
    if len(placements) != 1 or not placements[0].is_shard(0):
        raise UnsupportedModuleError(
            name,
            expected="rows spread over one axis of ranks, Shard(0), as fully_shard leaves them",
            got=f"placements {tuple(placements)}",
            remedy="use fully_shard on a one-dimensional mesh, without shard_placement_fn",
        )
    return bool(mesh_of(tensor).size() == 1)


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
    if not any(id(p) in names for group in optimizer.param_groups for p in group["params"]):
        raise InvalidArgumentError(
            "optimizer",
            expected="an optimizer of the model's own parameters",
            got="one of other parameters, whose state would stay behind",
            remedy="build it from model.parameters() after the model was last copied or wrapped",
        )
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


def _refuse_shared_memory(names: Sequence[str], parts: Sequence[torch.Tensor]) -> None:
    """Refuse two tensors that begin at one address: the second would move what has moved before."""
    named = [(p.data_ptr(), name) for name, p in zip(names, parts, strict=True) if p.numel()]
    seen: dict[int, str] = {}
    for address, name in named:
        # Tensors without data, as on the meta device, are refused elsewhere.
        if address and seen.setdefault(address, name) != name:
            raise InvalidArgumentError(
                name,
                expected="memory of its own",
                got=f"that of {seen[address]}",
                remedy="tie parameters by making them one object, then call discover again",
            )


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
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        raise InvalidArgumentError(
            name,
            expected="a tensor that may be changed in place",
            got="one made under torch.inference_mode",
            remedy="make or load the model outside inference mode",
        )
    if tensor.layout != torch.strided:
        raise UnsupportedModuleError(
            name,
            expected="a dense tensor held by one process",
            got=f"{type(tensor).__name__} of layout {tensor.layout}",
            remedy="gather it first",
        )
