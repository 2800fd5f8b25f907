"""Move weights, gradients and optimizer state by index, in place.

A tensor is gathered along all its moving axes with one temporary of its own size at most, and
written back into its own storage, so ties, views, dtype, device and `requires_grad` stay. Tensors
whose rows lie on several ranks are moved by `sharded`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.permutation.move import fused, sharded, threads
from shuffled_dpsgd.permutation.move.drawing import Permutation
from shuffled_dpsgd.permutation.move.inventory import Inventory, sort_out, take_inventory
from shuffled_dpsgd.runtime.routes import took

# A tensor that moves along one axis only is moved slice by slice: the temporary stays in cache, and
# is large enough that threads seldom wait for each other.
_SLICE_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 23}


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
    _move(permutation, take_inventory(permutation.spec, model, optimizer))


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
    moving = [(n, t) for n, t in tensors.items() if n in permutation.spec.axes_of]
    _move(permutation, sort_out(permutation.spec, moving))


def _move(permutation: Permutation, inventory: Inventory) -> None:
    on_device = functools.cache(permutation.to)
    spec = permutation.spec
    if inventory.sharded:
        took("moving weights", "all-to-all")
        sharded.move(permutation, inventory.sharded, gather_)
    for prepared in inventory.together:
        took("moving weights", "triton")
        fused.move(on_device(prepared.pointers.device), prepared)
    for (device, dtype), tensors in inventory.apart.items():
        took("moving weights", "threads" if device.type == "cpu" else "indexing")
        indices = on_device(device).indices
        placed: list[threads.Placed] = [
            (tensor, [(axis, indices[layout]) for axis, layout in spec.axes_of[name]])
            for name, tensor in tensors
        ]
        if device.type == "cpu":
            placed = threads.move(placed)
        if not placed:
            continue
        # One buffer for all: fresh memory for every tensor would cost more than moving it.
        most = max(_temporary_elements(tensor, [a for a, _ in axes]) for tensor, axes in placed)
        temporary = torch.empty(most, dtype=dtype, device=device)
        for tensor, axes in placed:
            gather_(tensor, axes, temporary)


def gather_(
    tensor: torch.Tensor,
    axes: Sequence[tuple[int, torch.Tensor]],
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
