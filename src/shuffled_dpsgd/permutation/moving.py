"""Move weights, gradients and optimizer state by index, in place.

A tensor is gathered along its moving axes and written back into its own storage, so ties, views,
dtype, device and `requires_grad` stay. It takes one temporary of at most its own size. On a GPU
with Triton most tensors take none (`gpu`). Tensors whose rows lie on several ranks are moved by
`sharded`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from shuffled_dpsgd.errors import InvalidArgumentError, UnsupportedModuleError
from shuffled_dpsgd.permutation import gpu, sharded
from shuffled_dpsgd.permutation.drawing import Permutation
from shuffled_dpsgd.permutation.spec import PermutationSpec
from shuffled_dpsgd.runtime.backends import TAKEN
from shuffled_dpsgd.runtime.shards import RowAxis, all_held

Named = tuple[str, torch.Tensor]
OnAxis = tuple[int, torch.Tensor]


@torch.no_grad()
def apply(
    permutation: Permutation,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
) -> None:
    """Permute the model's weights and gradients, and the optimizer's state, in place.

    Optimizer state moves if it has the parameter's shape (momentum, Adam moments); a scalar such
    as a step count stays; any other state tensor is refused before anything moves. Optimizer
    steps commute with this as far as they work entry by entry.
    """
    spec, parameters = permutation.spec, dict(model.named_parameters())
    _check_model(spec, parameters)
    moving: list[Named] = [(name, parameters[name]) for name in spec.axes_of]
    moving += [(name, p.grad) for name, p in moving if p.grad is not None]
    if optimizer is not None:
        moving += _optimizer_tensors(spec, parameters, optimizer)
    _move(permutation, moving)


@torch.no_grad()
def apply_to_tensors(permutation: Permutation, tensors: Mapping[str, torch.Tensor]) -> None:
    """Permute tensors shaped like the parameters they are named after, in place."""
    shapes = permutation.spec.shapes
    for name, tensor in tensors.items():
        if name not in shapes or shapes[name] != tuple(tensor.shape):
            raise InvalidArgumentError(
                name,
                expected=f"a parameter of the spec, of shape {shapes.get(name)}",
                got=tuple(tensor.shape),
            )
    _move(permutation, [(n, t) for n, t in tensors.items() if n in permutation.spec.axes_of])


def _move(permutation: Permutation, moving: Sequence[Named]) -> None:
    """Choose how each tensor is moved, refuse those that cannot be, then move all of them."""
    spec = permutation.spec
    parts = all_held([tensor for _, tensor in moving])
    _refuse_shared_memory(moving, parts)
    by_kernels: dict[tuple[torch.device, int], list[Named]] = {}
    by_indexing: list[Named] = []
    spread: dict[str, list[Named]] = {}
    for (name, source), tensor in zip(moving, parts, strict=True):
        if tensor is not source and not _is_whole(name, source):
            spread.setdefault(name, []).append((name, source))
        elif tensor.is_cuda and gpu.can_move(spec, name, tensor):
            key = tensor.device, tensor.element_size()
            by_kernels.setdefault(key, []).append((name, tensor))
        else:
            _check_movable(name, tensor)
            by_indexing.append((name, tensor))
    on_device = functools.cache(permutation.to)
    if spread:
        TAKEN["moving weights"].add("all-to-all")
        sharded.move(permutation, [named for found in spread.values() for named in found], gather_)
    for (device, _), together in by_kernels.items():
        TAKEN["moving weights"].add("triton")
        gpu.move(on_device(device), together)
    for name, tensor in by_indexing:
        TAKEN["moving weights"].add("indexing")
        indices = on_device(tensor.device).indices
        gather_(tensor, [(axis, indices[layout]) for axis, layout in spec.axes_of[name]])


def gather_(tensor: torch.Tensor, axes: Sequence[OnAxis]) -> None:
    """tensor[i, j, ...] = tensor[index_0[i], index_1[j], ...] in place, by permutations."""
    *others, (axis, index) = axes
    moved = tensor if others else tensor.clone()
    for other, along in others:
        moved = moved.index_select(other, along)
    torch.index_select(moved, axis, index, out=tensor)


def _check_model(spec: PermutationSpec, parameters: Mapping[str, torch.Tensor]) -> None:
    """Refuse a model whose parameters are not those the spec was made from."""
    found = {name: tuple(p.shape) for name, p in parameters.items()}
    if found != dict(spec.shapes):
        names = found.keys() | spec.shapes
        differing = sorted(n for n in names if found.get(n) != spec.shapes.get(n))
        raise InvalidArgumentError(
            "model",
            expected="the parameters the spec was discovered from",
            got=f"a difference in {', '.join(differing[:3])}",
            remedy="call discover on this model",
        )


def _optimizer_tensors(
    spec: PermutationSpec,
    parameters: Mapping[str, torch.Tensor],
    optimizer: torch.optim.Optimizer,
) -> list[Named]:
    """Every optimizer state tensor that moves, with the name of its parameter."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    if not any(id(p) in names for group in optimizer.param_groups for p in group["params"]):
        raise InvalidArgumentError(
            "optimizer",
            expected="an optimizer of the model's own parameters",
            got="one of other parameters, whose state would stay behind",
            remedy="build it from model.parameters() after the model was last copied or wrapped",
        )
    found: list[Named] = []
    for parameter, state in optimizer.state.items():
        name = names.get(id(parameter))
        if name is None or name not in spec.axes_of:
            continue
        for key, value in state.items():
            got = ""
            if isinstance(value, torch.Tensor):
                if value.shape == parameter.shape:
                    found.append((name, value))
                elif value.ndim > 0 and value.numel() > 1:
                    got = f"shape {tuple(value.shape)}"
            elif isinstance(value, list | tuple | dict):
                got = type(value).__name__
            if got:
                raise UnsupportedModuleError(
                    f"optimizer.state[{name}][{key}]",
                    expected="state of the parameter's shape, or a scalar",
                    got=got,
                    remedy="use an optimizer that works entry by entry, such as SGD or AdamW",
                )
    return found


def _is_whole(name: str, tensor: torch.Tensor) -> bool:
    """Whether one rank holds all rows of a sharded tensor; refused if spread in another way."""
    axis = RowAxis.of(tensor)
    if axis.ranks is None:
        raise UnsupportedModuleError(
            name,
            expected="rows spread over one axis of ranks, Shard(0), as fully_shard leaves them",
            got=f"placements {axis.placements}",
            remedy="use fully_shard without shard_placement_fn",
        )
    return axis.ranks == 1


def _refuse_shared_memory(moving: Sequence[Named], parts: Sequence[torch.Tensor]) -> None:
    """Refuse two tensors that begin at one address: the second would move what has moved before."""
    seen: dict[int, str] = {}
    for (name, _), part in zip(moving, parts, strict=True):
        # On the meta device, which is refused later, every address is 0.
        address = part.data_ptr() if part.numel() else 0
        if address and seen.setdefault(address, name) != name:
            raise InvalidArgumentError(
                name,
                expected="memory of its own",
                got=f"that of {seen[address]}",
                remedy="tie parameters by making them one object, then call discover again",
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
