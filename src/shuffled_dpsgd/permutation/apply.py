"""Move weights, gradients and optimizer state by index, in place.

A tensor is gathered along all its moving axes with one temporary of its own size at most, and
written back into its own storage, so ties, views, dtype, device and `requires_grad` stay.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from shuffled_dpsgd.errors import InvalidArgumentError, UnsupportedModuleError
from shuffled_dpsgd.permutation import fused
from shuffled_dpsgd.permutation.draw import Permutation
from shuffled_dpsgd.permutation.spec import PermutationSpec

# A tensor that moves along one axis only is moved slice by slice: the temporary stays in cache.
_SLICE_ELEMENTS = {"cpu": 1 << 17, "cuda": 1 << 23}


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
    parameters = dict(model.named_parameters())
    check_model(permutation.spec, parameters)
    moving: list[tuple[str, torch.Tensor]] = []
    for name in permutation.spec.axes_of:
        parameter = parameters[name]
        moving.append((name, parameter))
        if parameter.grad is not None:
            moving.append((name, parameter.grad))
    if optimizer is not None:
        moving += optimizer_tensors(permutation.spec, parameters, optimizer)
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
        if name not in spec.axes_of:
            continue
        for key, value in state.items():
            if _has_shape_of(parameter, value, f"optimizer.state[{name}][{key}]"):
                found.append((name, value))
    return found


def _has_shape_of(parameter: torch.Tensor, value: Any, where: str) -> bool:
    if not isinstance(value, torch.Tensor):
        if isinstance(value, list | tuple | dict):
            raise _unknown_state(where, type(value).__name__)
        return False
    if value.shape == parameter.shape:
        return True
    if value.ndim > 0 and value.numel() > 1:
        raise _unknown_state(where, f"shape {tuple(value.shape)}")
    return False


def _unknown_state(where: str, got: str) -> UnsupportedModuleError:
    return UnsupportedModuleError(
        where,
        expected="state of the parameter's shape, or a scalar",
        got=got,
        remedy="use an optimizer that works entry by entry, such as SGD or AdamW",
    )


def _move(permutation: Permutation, moving: list[tuple[str, torch.Tensor]]) -> None:
    for name, tensor in moving:
        _check_movable(name, tensor)
    on_device = functools.cache(permutation.to)
    spec = permutation.spec
    together: dict[tuple[torch.device, int], list[tuple[str, torch.Tensor]]] = {}
    apart: dict[tuple[torch.device, torch.dtype], list[tuple[str, torch.Tensor]]] = {}
    for name, tensor in moving:
        if fused.can_move(spec, name, tensor):
            together.setdefault((tensor.device, tensor.element_size()), []).append((name, tensor))
        else:
            apart.setdefault((tensor.device, tensor.dtype), []).append((name, tensor))
    for (device, _), tensors in together.items():
        fused.move(on_device(device), tensors)
    for (device, dtype), tensors in apart.items():
        indices = on_device(device).indices
        # One buffer for all: fresh memory for every tensor would cost more than moving it.
        most = max(
            _temporary_elements(tensor, [axis for axis, _ in spec.axes_of[name]])
            for name, tensor in tensors
        )
        temporary = torch.empty(most, dtype=dtype, device=device)
        for name, tensor in tensors:
            axes = [(axis, indices[layout]) for axis, layout in spec.axes_of[name]]
            gather_(tensor, axes, temporary)


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


def gather_(
    tensor: torch.Tensor,
    axes: list[tuple[int, torch.Tensor]],
    temporary: torch.Tensor | None = None,
) -> None:
    """tensor[i, j, ...] = tensor[index_0[i], index_1[j], ...] in place, for the axes given.

    `temporary` is a flat buffer to work in, of the tensor's dtype and at least its size.
    """
    if temporary is None:
        temporary = tensor.new_empty(_temporary_elements(tensor, [axis for axis, _ in axes]))
    if len(axes) == 1:
        axis, index = axes[0]
        for part in _slices(tensor, axis):
            copied = temporary[: part.numel()].view(part.shape).copy_(part)
            torch.index_select(copied, axis, index, out=part)
        return
    copied = temporary[: tensor.numel()].view(tensor.shape)
    first, *between, last = axes
    torch.index_select(tensor, *first, out=copied)
    for axis, index in between:
        copied.copy_(copied.index_select(axis, index))
    torch.index_select(copied, *last, out=tensor)


def _temporary_elements(tensor: torch.Tensor, axes: list[int]) -> int:
    return tensor.numel() if len(axes) > 1 else _slices(tensor, axes[0])[0].numel()


def _slices(tensor: torch.Tensor, axis: int) -> tuple[torch.Tensor, ...]:
    """Slices across the longest axis that does not move, none much above the slice size."""
    limit = _SLICE_ELEMENTS.get(tensor.device.type, 1 << 23)
    others = [d for d in range(tensor.ndim) if d != axis]
    if tensor.numel() <= limit or not others:
        return (tensor,)
    along = max(others, key=lambda d: tensor.shape[d])
    parts = min(tensor.shape[along], -(-tensor.numel() // limit))
    return tensor.chunk(parts, dim=along)
