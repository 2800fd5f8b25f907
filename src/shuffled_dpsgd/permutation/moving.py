"""Move weights, gradients and optimizer state by index, in place.

A tensor is gathered along its moving axes with one temporary of its own size at most, and written
back into its own storage, so ties, views, dtype, device and `requires_grad` stay. On a GPU with
Triton kernels of ours move most tensors without a temporary (`gpu`). Tensors whose rows lie on
several ranks are moved by `sharded`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.permutation import gpu, sharded
from shuffled_dpsgd.permutation.drawing import Permutation
from shuffled_dpsgd.permutation.inventory import Inventory, sort_out, take_inventory
from shuffled_dpsgd.runtime.backends import took

OnAxis = tuple[int, torch.Tensor]
# A tensor that moves along one axis only is moved in parts: the temporary stays in the cache.
_PART_ELEMENTS = 1 << 20


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
    if inventory.sharded:
        took("moving weights", "all-to-all")
        sharded.move(permutation, inventory.sharded, gather_)
    for table in inventory.tables:
        took("moving weights", "triton")
        gpu.move(on_device(table.pointers.device), table)
    for (device, dtype), tensors in inventory.apart.items():
        took("moving weights", "indexing")
        indices = on_device(device).indices
        # One buffer for all: fresh memory for every tensor would cost more than moving it.
        most = max(_temporary_elements(tensor, axes) for tensor, axes in tensors)
        temporary = torch.empty(most, dtype=dtype, device=device)
        for tensor, axes in tensors:
            gather_(tensor, [(axis, indices[layout]) for axis, layout in axes], temporary)


def gather_(
    tensor: torch.Tensor, axes: Sequence[OnAxis], temporary: torch.Tensor | None = None
) -> None:
    """tensor[i, j, ...] = tensor[index_0[i], index_1[j], ...] in place, for the axes given.

    Every index must be a permutation of its axis. `temporary` is a flat buffer to work in, of the
    tensor's dtype and at least its size.
    """
    if temporary is None:
        temporary = tensor.new_empty(_temporary_elements(tensor, axes))
    first, *others = axes
    if not others:
        for part in _parts(tensor, first[0]):
            copied = temporary[: part.numel()].view(part.shape).copy_(part)
            torch.index_select(copied, *first, out=part)
        return
    *between, last = others
    moved = temporary[: tensor.numel()].view(tensor.shape)
    torch.index_select(tensor, *first, out=moved)
    for axis, index in between:
        moved.copy_(moved.index_select(axis, index))
    torch.index_select(moved, *last, out=tensor)


def _temporary_elements(tensor: torch.Tensor, axes: Sequence[tuple[int, object]]) -> int:
    return tensor.numel() if len(axes) > 1 else _parts(tensor, axes[0][0])[0].numel()


def _parts(tensor: torch.Tensor, axis: int) -> tuple[torch.Tensor, ...]:
    """Slices across the longest axis that does not move, none much above the size of a part."""
    others = [d for d in range(tensor.ndim) if d != axis]
    if tensor.numel() <= _PART_ELEMENTS or not others:
        return (tensor,)
    along = max(others, key=lambda d: tensor.shape[d])
    return tensor.chunk(-(-tensor.numel() // _PART_ELEMENTS), dim=along)
