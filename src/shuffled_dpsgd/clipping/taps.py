"""Captures leave a compiled backward as gradients of extra inputs of the graph.

A tap is a tensor of the shape and type of one captured tensor and of one element's memory (all
strides are zero). A layer's function takes it as an input, ignores it, and gives the captured
tensor itself as its gradient. For the compiler that is an ordinary output of the backward: it is
not copied, and no Python runs inside. All taps are outputs of one function, whose backward thus
receives every capture in a single call.

Taps need shapes, which only a first batch can tell; it goes through the operator in `traced`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from shuffled_dpsgd.clipping.traced import find_sink

# Which call of which part of which slot: (slot index, part, number of the call).
Call = tuple[int, int, int]
Spec = tuple[torch.Size, torch.dtype]
Signature = tuple[object, ...]


def signature_of(args: tuple[Any, ...], kwargs: dict[str, Any], device: str) -> Signature:
    """What the shapes of a forward's captures depend on: its inputs and its autocast."""
    found: list[object] = []
    if torch.is_autocast_enabled(device):
        found.append(torch.get_autocast_dtype(device))
    for leaf in tree_leaves((args, kwargs)):
        if isinstance(leaf, Tensor):
            found += [tuple(leaf.shape), leaf.dtype]
        elif isinstance(leaf, int | float | str):
            found.append(leaf)
    return tuple(found)


@dataclass(frozen=True, kw_only=True)
class Taps:
    """The taps of one batch signature, by call; `order` says whose gradients come where."""

    signature: Signature
    by_call: dict[Call, tuple[Tensor, ...]]
    order: tuple[tuple[Call, slice], ...]


class TapSource(torch.autograd.Function):
    """Makes taps, and hands their gradients to a sink all at once, in every backward anew."""

    @staticmethod
    def forward(ctx: Any, root: Tensor, specs: Sequence[Spec], handle: int) -> Any:
        ctx.handle = handle
        # A tap that no loss depends on has no gradient, rather than one of full size.
        ctx.set_materialize_grads(False)
        return tuple(
            torch.empty_strided(shape, (0,) * len(shape), dtype=dtype, device=root.device)
            for shape, dtype in specs
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        find_sink(ctx.handle).deliver(grads)
        return None, None, None


def make_taps(
    captures: Mapping[Call, tuple[Spec, ...]], signature: Signature, root: Tensor, handle: int
) -> Taps | None:
    """Taps for the calls of one backward, or None where there is nothing to gain.

    The last call stays with the operator, which counts backwards: the gradients of two forwards
    that meet in one backward would be added up in the taps unnoticed. So do calls that capture
    token ids, which cannot be gradients.
    """
    chosen = {
        call: specs
        for call, specs in list(captures.items())[:-1]
        if all(dtype.is_floating_point for _, dtype in specs)
    }
    if not chosen:
        return None
    for (index, part, number), specs in chosen.items():
        # A part below zero names the layer whose first call has the same input.
        if part < 0 and (-1 - part, 0, 1) in chosen:
            chosen[(index, part, number)] = specs[-1:]
    flat = [spec for specs in chosen.values() for spec in specs]
    # The end of a backward, where taps are made, has gradients switched off.
    with torch.enable_grad():
        tensors = cast(tuple[Tensor, ...], TapSource.apply(root, flat, handle))
    by_call: dict[Call, tuple[Tensor, ...]] = {}
    order: list[tuple[Call, slice]] = []
    first = 0
    for call, specs in chosen.items():
        place = slice(first, first + len(specs))
        by_call[call] = tensors[place]
        order.append((call, place))
        first = place.stop
    return Taps(signature=signature, by_call=by_call, order=tuple(order))
