"""Checks that what a layer computes once for all samples is only broadcast over them.

Position ids of shape (1, T) are expanded over the batch before their lookup, so that every sample
has its own row and its own gradient. If the model then takes row zero, or the mean of the rows, its
outputs stay what they were, but the gradients of all samples end in one row. So two samples are
run with different numbers added to their rows: each must come out as if that row had been the only
one. A model that repeats the rows over the batch by itself fails outright.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from shuffled_dpsgd.clipping.capture.slot import Slot
from shuffled_dpsgd.clipping.checks.row_identity import (
    RowMarks,
    Weights,
    repeats,
    row_differs,
    rows_of,
)
from shuffled_dpsgd.clipping.rules.embedding import EmbeddingSlot
from shuffled_dpsgd.errors import UnsupportedModuleError

_SAMPLES = 2
# Calls without batch axis, with what random numbers are multiplied by that are added to outputs.
SharedCalls = dict[int, Tensor | None]


def check_shared(slot: Slot, slots: Sequence[Slot], forward: Callable[[], Any]) -> None:
    """Try `slot`, some of whose inputs have no batch axis, in a forward of two samples.

    Raises:
        UnsupportedModuleError: what it computes is used otherwise than by broadcasting.
    """
    shared_calls: SharedCalls = {}
    weights: Weights = {}

    def single(sample: int) -> RowMarks:
        with _adding(slot, sample, shared_calls):
            return rows_of(slots, forward, _SAMPLES, weights)

    try:
        alone = [single(sample) for sample in range(_SAMPLES)]
        with _adding(slot, None, shared_calls):
            together = rows_of(slots, forward, _SAMPLES, weights)
    except (RuntimeError, ValueError, IndexError) as error:
        raise _refusal(slot, f"{type(error).__name__}: {str(error).splitlines()[0]}") from error
    moved = any(row_differs(alone[i], together, i, _SAMPLES) for i in range(_SAMPLES))
    # A model that draws random numbers cannot be compared with itself.
    if moved and repeats(alone[0], single(0)):
        raise _refusal(slot, "another use of what it computes once for all samples")


@contextmanager
def _adding(slot: Slot, sample: int | None, shared_calls: SharedCalls) -> Iterator[None]:
    """Add a sample's own numbers to what the slot computes once for all.

    Without a `sample`, the input is expanded as the engine will do, and every row gets the numbers
    of its sample. Calls without batch axis are noted in `shared_calls`, with the size of their
    outputs, and then known by them: an expanded call gives a batch axis to those that follow.
    """
    calls = 0

    def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
        leaves, structure = tree_flatten((args, kwargs))
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        if not places:
            return None
        first = leaves[places[0]]
        if sample is not None:
            if _has_no_batch(slot, first):
                shared_calls.setdefault(calls, None)
            return None
        if calls in shared_calls:
            for i in places:
                if leaves[i].dim() == first.dim() and _has_no_batch(slot, leaves[i]):
                    leaves[i] = _expanded(slot, leaves[i])
        return tree_unflatten(leaves, structure)

    def after(_: nn.Module, args: Any, output: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls - 1 not in shared_calls:
            return None
        leaves, structure = tree_flatten(output)
        scale = shared_calls[calls - 1]
        if scale is None:
            # As large as what is typical, and left on the device, which nobody has to wait for.
            scale = 1.0 + leaves[0].float().square().mean().sqrt()
            shared_calls[calls - 1] = scale
        leaves[0] = leaves[0] + scale * _numbers(leaves[0], slot.batch_axis, sample, seed=calls)
        return tree_unflatten(leaves, structure)

    with ExitStack() as hooks:
        for handle in (
            slot.module.register_forward_pre_hook(before, with_kwargs=True),
            slot.module.register_forward_hook(after),
        ):
            hooks.callback(handle.remove)
        yield


def _has_no_batch(slot: Slot, x: Tensor) -> bool:
    if isinstance(slot, EmbeddingSlot) and (slot.shared_by_batch or x.dim() < 2):
        return slot.shared_by_batch or x.dim() == 0 or len(x) != _SAMPLES
    return x.dim() > slot.batch_axis and x.shape[slot.batch_axis] == 1


def _expanded(slot: Slot, x: Tensor) -> Tensor:
    if isinstance(slot, EmbeddingSlot) and (slot.shared_by_batch or x.dim() < 2):
        return x.expand(_SAMPLES, *x.shape)
    sizes = [-1] * x.dim()
    sizes[slot.batch_axis] = _SAMPLES
    return x.expand(sizes)


def _numbers(output: Tensor, axis: int, sample: int | None, *, seed: int) -> Tensor:
    """Random numbers of every sample for its row, or of one sample for a row all samples share."""
    has_axis = output.dim() > axis and (sample is None or output.shape[axis] == 1)
    shape = output.select(axis, 0).shape if has_axis else output.shape
    seeds = [torch.Generator("cpu").manual_seed(_SAMPLES * seed + i) for i in range(_SAMPLES)]
    rows = [torch.randn(shape, generator=generator, device="cpu") for generator in seeds]
    found = torch.stack(rows, axis) if sample is None else rows[sample]
    if sample is not None and has_axis:
        found = found.unsqueeze(axis)
    return found.to(output)


def _refusal(slot: Slot, got: str) -> UnsupportedModuleError:
    return UnsupportedModuleError(
        slot.path,
        expected="a layer without batch axis whose output is only broadcast over the samples",
        got=got,
        remedy="expand its input to one row per sample before calling it, or freeze it",
    )
