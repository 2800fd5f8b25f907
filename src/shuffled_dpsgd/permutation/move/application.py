"""Move weights, gradients and optimizer state by index, in place.

A tensor is gathered along all its moving axes with one temporary of its own size at most, and
written back into its own storage, so ties, views, dtype, device and `requires_grad` stay. Tensors
whose rows lie on several ranks are moved by `sharded`.

On a CPU numpy moves large tensors, on one thread. torch would use all its threads, which wait for
each other after every tensor: with another process on one of two cores that took up to ten times as
long.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import nn

from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.permutation.move import fused, sharded
from shuffled_dpsgd.permutation.move.drawing import Permutation
from shuffled_dpsgd.permutation.move.inventory import Inventory, sort_out, take_inventory
from shuffled_dpsgd.runtime.backends import took

OnAxis = tuple[int, torch.Tensor]
# A tensor that moves along one axis only is moved slice by slice: the temporary stays in cache.
_SLICE_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 23}
# torch moves fewer elements than these on one thread, and is called more quickly than numpy.
_ONE_THREAD = 1 << 15
# numpy moves elements as if they were of these dtypes, by their size: it has no bfloat16.
_CARRIERS = {1: torch.int8, 2: torch.int16, 4: torch.float32, 8: torch.int64}


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
        took("moving weights", "numpy" if device.type == "cpu" else "indexing")
        indices = on_device(device).indices
        placed = [
            (tensor, [(axis, indices[layout]) for axis, layout in spec.axes_of[name]])
            for name, tensor in tensors
        ]
        # One buffer for all: fresh memory for every tensor would cost more than moving it.
        most = max(_temporary_elements(tensor, [a for a, _ in axes]) for tensor, axes in placed)
        temporary = torch.empty(most, dtype=dtype, device=device)
        for tensor, axes in placed:
            gather_(tensor, axes, temporary)


def gather_(
    tensor: torch.Tensor, axes: Sequence[OnAxis], temporary: torch.Tensor | None = None
) -> None:
    """tensor[i, j, ...] = tensor[index_0[i], index_1[j], ...] in place, for the axes given.

    Every index must be a permutation of its axis. `temporary` is a flat buffer to work in, of the
    tensor's dtype and at least its size.
    """
    if temporary is None:
        temporary = tensor.new_empty(_temporary_elements(tensor, [axis for axis, _ in axes]))
    select: Callable[..., object] = torch.index_select
    copy: Callable[..., object] = torch.Tensor.copy_
    if _suits_numpy(tensor):
        # Writes through numpy are not seen by autograd, which must refuse a backward over them.
        torch.autograd.graph.increment_version(tensor)
        carrier = _CARRIERS[tensor.element_size()]
        tensor, temporary = tensor.detach().view(carrier), temporary.view(carrier)
        select, copy = _take, _copy
    if len(axes) == 1:
        axis, index = axes[0]
        for part in _slices(tensor, axis):
            copied = temporary[: part.numel()].view(part.shape)
            copy(copied, part)
            select(copied, axis, index, out=part)
        return
    copied = temporary[: tensor.numel()].view(tensor.shape)
    first, *between, last = axes
    select(tensor, *first, out=copied)
    for axis, index in between:
        copied.copy_(copied.index_select(axis, index))
    select(copied, *last, out=tensor)


def _suits_numpy(tensor: torch.Tensor) -> bool:
    """Whether numpy sees the tensor's memory as it is, and is worth calling."""
    return (
        tensor.numel() >= _ONE_THREAD
        and tensor.device.type == "cpu"
        and type(tensor) in (torch.Tensor, nn.Parameter)
        and tensor.element_size() in _CARRIERS
        and not (tensor.is_conj() or tensor.is_neg())
    )


def _take(source: torch.Tensor, axis: int, index: torch.Tensor, *, out: torch.Tensor) -> None:
    if source.dtype is torch.float32 and (axis, source.ndim) == (1, 2):
        # Of a matrix's columns torch is faster, and on one thread too.
        torch.index_select(source, axis, index, out=out)
    else:
        source.numpy().take(index.numpy(), axis, out.numpy(), "clip")


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    np.copyto(target.numpy(), source.numpy())


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
