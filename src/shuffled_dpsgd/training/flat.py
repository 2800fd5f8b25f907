"""Tensors that lie side by side in memory, seen as one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, repeat
from operator import attrgetter, is_

from torch import Tensor

_base, _dtype = attrgetter("_base"), attrgetter("dtype")


def abutting(
    tensors: Sequence[Tensor], labels: Sequence[object] | None = None
) -> list[list[Tensor]]:
    """The tensors in order, in runs whose elements follow one another in one storage.

    A run can be seen whole by `as_flat`. Only views of one tensor are joined: two allocations may
    border on each other by chance. With `labels`, one per tensor, a run has a single label.
    """
    if _have_one_label(labels) and _fill_one_buffer(tensors):
        return [list(tensors)]
    runs: list[list[Tensor]] = []
    base: Tensor | None = None
    end, dtype, label = -1, None, None
    for index, tensor in enumerate(tensors):
        owner = tensor._base
        owner = tensor if owner is None else owner
        start = int(tensor.storage_offset())
        mine = None if labels is None else labels[index]
        contiguous = tensor.is_contiguous()
        alike = tensor.dtype is dtype and mine == label
        if owner is base and start == end and alike and contiguous:
            runs[-1].append(tensor)
        else:
            runs.append([tensor])
        base, end = (owner, start + tensor.numel()) if contiguous else (None, -1)
        dtype, label = tensor.dtype, mine
    return runs


def _have_one_label(labels: Sequence[object] | None) -> bool:
    return not labels or labels.count(labels[0]) == len(labels)


def _fill_one_buffer(tensors: Sequence[Tensor]) -> bool:
    """Whether all are a single run, as an engine's sums are; asked at every step, hence in C."""
    if not tensors:
        return False
    bases = [*map(_base, tensors)]
    sizes, offsets = [*map(Tensor.numel, tensors)], [*map(Tensor.storage_offset, tensors)]
    return (
        bases[0] is not None
        and all(map(is_, bases, repeat(bases[0])))
        and offsets == [*accumulate(sizes[:-1], initial=offsets[0])]
        and len({*map(_dtype, tensors)}) == 1
        and all(map(Tensor.is_contiguous, tensors))
    )


def as_flat(run: Sequence[Tensor]) -> Tensor:
    """One run of `abutting` as a vector that shares its memory."""
    first = run[0]
    if len(run) == 1:
        return first.view(-1)
    size = sum(tensor.numel() for tensor in run)
    return first.as_strided((size,), (1,), first.storage_offset())


def merged(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Contiguous tensors as few vectors: one where all lie in one buffer, in order."""
    return [as_flat(run) for run in abutting(tensors)]
