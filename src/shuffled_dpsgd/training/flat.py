"""Adjacent views of one buffer, joined into one vector."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def abutting(
    tensors: Sequence[Tensor], labels: Sequence[object] | None = None
) -> list[list[Tensor]]:
    """Group tensors, in order, into runs that are contiguous in one storage.

    `as_flat` makes one vector of a run. Only views of one tensor are joined: separate allocations
    may be adjacent by chance. With `labels`, one per tensor, a run has a single label.
    """
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


def as_flat(run: Sequence[Tensor]) -> Tensor:
    """A run of `abutting` as one vector that shares its memory."""
    first = run[0]
    if len(run) == 1:
        return first.view(-1)
    size = sum(tensor.numel() for tensor in run)
    return first.as_strided((size,), (1,), first.storage_offset())


def merged(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Contiguous tensors as few vectors: one, if all are adjacent in one buffer."""
    return [as_flat(run) for run in abutting(tensors)]
