"""Captures leave a compiled backward as gradients of extra inputs of the graph.

A tap is a tensor with the shape and type of one captured tensor but the memory of one element (all
strides are zero). A layer's function takes it as an input, ignores it, and returns the captured
tensor as its gradient. For the compiler that is an ordinary output of the backward: it is not
copied, and no Python runs inside. All taps are outputs of one function, whose backward therefore
receives all captures in a single call.

Taps need the shapes of captures, which a first batch shows. That one goes through `operator`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from shuffled_dpsgd.clipping.capture.operator import find_sink

# Which call of which part of which slot: (slot index, part, number of the call).
CallKey = tuple[int, int, int]
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
    """The taps of one batch signature; `order` says whose gradients come where.

    A call has a tap for the last tensor it captures, named by `key_of`. It may have one for the
    tensor before that, named the same with `BEFORE` appended. Small taps of one shape are rows of
    `stack`, so that the graph has few inputs; `named` then holds the number of the row.

    A compiled graph checks its inputs before every call. That takes long for hundreds of tensors,
    but not for the values of a dictionary that has not changed. So `named` never changes.
    """

    signature: Signature
    named: dict[str, Tensor | int]
    stack: Tensor | None
    order: tuple[tuple[CallKey, slice], ...]

    def rows(self) -> tuple[Tensor, ...]:
        """The rows of the stack, taken apart in one operation so that its gradient is one too."""
        return () if self.stack is None else self.stack.unbind(0)

    def of(self, key: str, rows: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The taps of a call, given `rows()`; none if it goes through the operator."""
        found = [self.named[name] for name in (key + BEFORE, key) if name in self.named]
        return tuple(rows[tap] if isinstance(tap, int) else tap for tap in found)

    def count(self, key: str) -> int:
        """How many taps a call has."""
        return (key in self.named) + (key + BEFORE in self.named)


BEFORE = "-"


def key_of(index: int, part: int, number: int) -> str:
    """A call as a string, which a dictionary looks up faster than a tuple."""
    return f"{index}.{part}.{number}"


class TapSource(torch.autograd.Function):
    """Makes taps, and hands their gradients to a sink all at once, in every backward anew."""

    @staticmethod
    def forward(ctx: Any, root: Tensor, specs: Sequence[Spec], handle: int) -> Any:
        ctx.handle = handle
        # Without this, a tap that no loss depends on would get zeros of full size.
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
    captures: Mapping[CallKey, tuple[Spec, ...]],
    small: Container[int],
    signature: Signature,
    root: Tensor,
    handle: int,
) -> Taps | None:
    """Taps for the calls of one backward, or None where there is nothing to gain.

    Slots whose index is in `small` capture small tensors only.
    """
    chosen = _chosen(captures)
    if not chosen:
        return None
    stacked = _of_one_shape({call: specs for call, specs in chosen.items() if call[0] in small})
    ordered = {call: specs for call, specs in chosen.items() if call not in stacked} | stacked
    rows = [spec for specs in stacked.values() for spec in specs]
    flat = [spec for specs in ordered.values() for spec in specs]
    apart = len(flat) - len(rows)
    if rows:
        shape, dtype = rows[0]
        flat[apart:] = [(torch.Size((len(rows), *shape)), dtype)]
    # The end of a backward, where taps are made, has gradients switched off.
    with torch.enable_grad():
        tensors = cast(tuple[Tensor, ...], TapSource.apply(root, flat, handle))
    named: dict[str, Tensor | int] = {}
    order: list[tuple[CallKey, slice]] = []
    first = 0
    for call, specs in ordered.items():
        place = slice(first, first + len(specs))
        names = (key_of(*call) + BEFORE, key_of(*call))[-len(specs) :]
        for name, number in zip(names, range(place.start, place.stop), strict=True):
            named[name] = tensors[number] if number < apart else number - apart
        order.append((call, place))
        first = place.stop
    stack = tensors[-1] if rows else None
    return Taps(signature=signature, named=named, stack=stack, order=tuple(order))


def _chosen(captures: Mapping[CallKey, tuple[Spec, ...]]) -> dict[CallKey, tuple[Spec, ...]]:
    """The calls that get taps, and for what.

    The last call stays with the operator, which notices a backward over two forwards; in taps
    alone their gradients would be added up unnoticed. Calls that capture token ids stay there too,
    because integers cannot be gradients.
    """
    chosen = {
        call: specs
        for call, specs in list(captures.items())[:-1]
        if all(dtype.is_floating_point for _, dtype in specs)
    }
    for (index, part, number), specs in chosen.items():
        # A part below zero names the owner of the input, whose first call records it.
        if part < 0 and (-1 - part, 0, 1) in chosen:
            chosen[(index, part, number)] = specs[-1:]
    return chosen


def _of_one_shape(calls: Mapping[CallKey, tuple[Spec, ...]]) -> dict[CallKey, tuple[Spec, ...]]:
    """Those of the calls that capture nothing but tensors of the commonest shape and type."""
    common = Counter(chain.from_iterable(calls.values())).most_common(1)
    return {
        call: specs for call, specs in calls.items() if set(specs) == {spec for spec, _ in common}
    }
