"""Two ways to run a module once per sample, each with its own copy of the parameters.

`at_once` has `torch.func.vmap` do it in one go. What that cannot run (branches on data, functions
with a backward of their own) is left to `one_by_one`, a loop: as exact, and as much slower as there
are samples.
"""

from __future__ import annotations

from collections.abc import Container
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from shuffled_dpsgd.clipping.capture.slot import Slot, unfolded
from shuffled_dpsgd.clipping.rules.embedding import OwnLookups
from shuffled_dpsgd.errors import UnsupportedModuleError

if TYPE_CHECKING:
    from shuffled_dpsgd.clipping.rules.generic import CopiesSlot

# Flat outputs and how they are put together again.
Outputs = tuple[list[Any], TreeSpec]

# What vmap can run and differentiate everywhere: on a CPU the flash kernel gives masks no gradient.
_MAPPED_ATTENTION = [
    SDPBackend.MATH,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
]
# Outputs that are the same for every sample.
_CONSTANTS = (bool, float, int, str, type(None))


class Bare(nn.Module):
    """A module's own forward, without its hooks and without a slot's replacement."""

    def __init__(self, slot: Slot) -> None:
        super().__init__()
        self.inner = slot.module
        self.own_forward = slot.plain

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.own_forward(*args, **kwargs)

    def flat_call_with(self, own: dict[str, Tensor], args: Any, kwargs: Any) -> Outputs:
        """Flat outputs and their structure, with some of the module's parameters replaced."""
        replaced = {f"inner.{key}": value for key, value in own.items()}
        return tree_flatten(functional_call(self, replaced, args, kwargs))


def at_once(
    slot: CopiesSlot, copies: dict[str, Tensor], leaves: list[Any], spec: TreeSpec, size: int
) -> Outputs:
    """The module under vmap over per-sample parameters and the inputs that have a batch axis."""
    bare = slot.bare
    rows = _rows_of_a_sample(slot, leaves, size)
    mapped = batched_leaves(leaves, rows * size, slot.unbatched)
    found: list[Any] = []
    out_spec: TreeSpec | None = None

    def one_sample(own: dict[str, Tensor], *inputs: Tensor) -> tuple[Tensor, ...]:
        nonlocal found, out_spec
        filled = list(leaves)
        for position, value in zip(mapped, inputs, strict=True):
            filled[position] = value
        args, kwargs = tree_unflatten(filled, spec)
        found, out_spec = bare.flat_call_with(own, args, kwargs)
        return tuple(_rows(slot, x, rows) for x in found if not isinstance(x, _CONSTANTS))

    attention = nullcontext() if torch.compiler.is_compiling() else sdpa_kernel(_MAPPED_ATTENTION)
    with attention, OwnLookups():
        inputs = [unfolded(leaves[i], size) for i in mapped]
        outputs = vmap(one_sample, randomness="different")(copies, *inputs)
    assert out_spec is not None
    tensors = iter([output.flatten(0, 1) for output in outputs])
    return [x if isinstance(x, _CONSTANTS) else next(tensors) for x in found], out_spec


def one_by_one(
    slot: CopiesSlot, copies: dict[str, Tensor], leaves: list[Any], spec: TreeSpec, size: int
) -> Outputs:
    """The module on one sample after the other, outputs joined along their batch axes."""
    rows = _rows_of_a_sample(slot, leaves, size)
    mapped = batched_leaves(leaves, rows * size, slot.unbatched)
    # Not one index after the other, each of which would have a gradient as large as all.
    owns = {key: copy.unbind(0) for key, copy in copies.items()}
    found: list[list[Any]] = []
    for sample in range(size):
        filled = list(leaves)
        for position in mapped:
            filled[position] = leaves[position][sample * rows : (sample + 1) * rows]
        args, kwargs = tree_unflatten(filled, spec)
        own = {key: parts[sample] for key, parts in owns.items()}
        with OwnLookups():
            outputs, out_spec = slot.bare.flat_call_with(own, args, kwargs)
        found.append(outputs)
    joined = [
        _joined(slot, place, [*parts]) for place, parts in enumerate(zip(*found, strict=True))
    ]
    return joined, out_spec


def batch_axes(alone: list[Any], together: list[Any], size: int) -> dict[int, int]:
    """Along which axis each output of samples, joined along the first, would be the batch's.

    The states of a recurrent layer have the batch on their second axis.

    >>> batch_axes([torch.zeros(6, 1, 4)], [torch.zeros(2, 3, 4)], 3)
    {0: 1}
    """
    axes = {}
    for place, (one, other) in enumerate(zip(alone, together, strict=False)):
        if not isinstance(one, Tensor) or not isinstance(other, Tensor) or one.shape == other.shape:
            continue
        single = (one.shape[0] // size, *one.shape[1:])
        for axis in range(1, len(single)):
            if other.shape == (*single[:axis], size * single[axis], *single[axis + 1 :]):
                axes[place] = axis
    return axes


def _joined(slot: CopiesSlot, place: int, parts: list[Any]) -> Any:
    if isinstance(parts[0], _CONSTANTS):
        return parts[0]
    tensors = [_rows(slot, part, len(part) if isinstance(part, Tensor) else 0) for part in parts]
    return torch.cat(tensors, slot.output_axes.get(place, 0))


def batched_leaves(leaves: list[Any], length: int, unbatched: Container[int] = ()) -> list[int]:
    """Positions of tensors as long as the batch, but `unbatched` ones, by accident so."""
    axes = [x.shape[:1] if isinstance(x, Tensor) else () for x in leaves]
    return [i for i, axis in enumerate(axes) if axis == (length,) and i not in unbatched]


def _rows_of_a_sample(slot: Slot, leaves: list[Any], size: int) -> int:
    """How many rows of the first tensor belong to each sample: one, unless the input is folded."""
    if not slot.folded:
        return 1
    length = next(len(x) for x in leaves if isinstance(x, Tensor) and x.dim())
    if length % size != 0:
        raise slot.refuse_batch_axis(size, torch.Size([length]))
    return length // size


def _rows(slot: CopiesSlot, output: Any, rows: int) -> Tensor:
    """A sample's rows: as many as of the input, or what was compared (of a router)."""
    fits = isinstance(output, Tensor) and output.dim() > 0
    if not fits or (output.shape[0] != rows and not slot.is_compared):
        raise UnsupportedModuleError(
            slot.path,
            expected="outputs with the batch on axis 0",
            got=tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__,
            remedy="give the module outputs per sample, or freeze its parameters",
        )
    return cast(Tensor, output)
