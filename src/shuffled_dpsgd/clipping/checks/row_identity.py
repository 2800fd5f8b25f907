"""Checks that row i of every layer's input and of the outputs belongs to sample i, and to it alone.

A model that sorts its batch by length, flips or rolls it, centres it or divides it by its largest
entry keeps every shape: but then one layer's row i is another layer's row j, norms are added up
across samples, and a sample may contribute more than its bound. With one sample added at the end of
the batch, no other row may change; with the batch back to front, the same rows must come back to
front; and each half of the batch must give by itself what it gives beside the other. Each of the
above breaks one of the three.

Shapes: B samples, N all other elements of a tensor. A mark holds three numbers of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shuffled_dpsgd.clipping.capture.slot import Slot, unfolded
from shuffled_dpsgd.errors import UnsupportedModuleError

# Relative to the length of a row; wider than what another batch size does to rounding.
_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3}
_HALF_TOLERANCE = 0.1
# The share of that tolerance by which two runs of one batch may differ before the model counts as
# random. It is small, because two runs show less of the randomness than all that are compared.
_REPEATED = 0.1

RowMarks = dict[int, list[Tensor]]
OUTPUTS = -1
# Outputs without axes: the mean or the sum of the samples' losses, if they are to be trained on.
NUMBERS = -2


def rows_of(slots: Sequence[Slot], forward: Callable[[], Any], size: int) -> RowMarks:
    """A mark per row, its tolerance and the row's size, (B, 3), for every call and every output.

    All rows of one of the `size` samples count as one where a slot's inputs are folded.
    """
    rows: RowMarks = {}
    marks_of = _Marker(coarse=_computes_in_half(slots))
    with _noting(slots, rows, marks_of, size):
        output = forward()
    leaves = [x for x in tree_leaves(output) if isinstance(x, Tensor) and x.dim() > 0]
    rows[OUTPUTS] = [marks_of(leaf, 0) for leaf in leaves if leaf.numel()]
    numbers = [leaf.detach().view(1, 1) for leaf in numbers_in(output)]
    rows[NUMBERS] = [marks_of(number, 0) for number in numbers]
    return rows


def numbers_in(output: Any) -> list[Tensor]:
    """The model's outputs that are single numbers, in order."""
    return [
        x
        for x in tree_leaves(output)
        if isinstance(x, Tensor) and x.dim() == 0 and x.is_floating_point()
    ]


def find_mixed_numbers(
    plain: RowMarks, halves: tuple[RowMarks, RowMarks], size: int
) -> frozenset[int]:
    """Which numbers are neither the sum nor the mean of what the halves of the batch give.

    A mean over tokens is neither where lengths differ: each sample changes the weight of all
    others.
    """
    found = set()
    first, second = size // 2, size - size // 2
    parts = (half.get(NUMBERS, []) for half in halves)
    for place, (whole, *both) in enumerate(zip(plain[NUMBERS], *parts, strict=False)):
        (value, tolerance), (a, b) = whole[0, :2].tolist(), (float(part[0, 0]) for part in both)
        off = min(abs(a + b - value), abs((first * a + second * b) / size - value))
        if off > _REPEATED * tolerance:
            found.add(place)
    return frozenset(found)


def find_moved_rows(
    plain: RowMarks,
    grown: RowMarks,
    flipped: RowMarks,
    halves: tuple[RowMarks, RowMarks] | None,
    size: int,
) -> int | None:
    """The first slot (or `OUTPUTS`) with a row of the batch of `size` that is not where it was.

    `grown` comes from the batch with one sample more, `flipped` from the batch back to front,
    `halves` from its samples before and after the middle. Tensors that did not grow have no batch
    axis and are passed over.
    """
    for index, calls in plain.items():
        others = zip(grown.get(index, []), flipped.get(index, []), strict=False)
        for call, (rows_B3, (grown_B3, flipped_B3)) in enumerate(zip(calls, others, strict=False)):
            if (len(rows_B3), len(grown_B3), len(flipped_B3)) != (size, size + 1, size):
                continue
            if _differ(rows_B3, grown_B3[:size]) or _differ(rows_B3, flipped_B3.flip(0)):
                return index
            if halves is not None and _halves_differ(rows_B3, halves, index, call):
                return index
    return None


def _halves_differ(
    rows_B3: Tensor, halves: tuple[RowMarks, RowMarks], index: int, call: int
) -> bool:
    """Whether a half of the batch, run by itself, has other rows.

    RowMarks of another size are passed over: a model may cut off what is padding for all samples.
    """
    parts = [half.get(index, [])[call : call + 1] for half in halves]
    if not all(parts):
        return False
    together = torch.cat([part[0] for part in parts])
    same_shape = len(together) == len(rows_B3) and torch.equal(together[:, 2], rows_B3[:, 2])
    return same_shape and _differ(rows_B3, together)


def repeats(one: RowMarks, other: RowMarks) -> bool:
    """Whether two runs of one batch agree: a model that draws random numbers does not."""
    return not any(
        len(a_B3) == len(b_B3) and _differ(a_B3, b_B3, _REPEATED)
        for index, calls in one.items()
        for a_B3, b_B3 in zip(calls, other.get(index, []), strict=False)
    )


def row_differs(one: RowMarks, other: RowMarks, row: int, size: int) -> bool:
    """Whether another run disagrees about one sample of `size`, wherever the first has that many.

    Tensors of another length in the first run have no batch axis and are passed over.
    """
    return any(
        len(a_B3) != len(b_B3) or _differ(a_B3[row : row + 1], b_B3[row : row + 1])
        for index, calls in one.items()
        for a_B3, b_B3 in zip(calls, other.get(index, []), strict=False)
        if len(a_B3) == size
    )


def moved_rows(path: str) -> UnsupportedModuleError:
    """The error for a layer (or, with an empty path, outputs) whose rows are not their samples."""
    return UnsupportedModuleError(
        path,
        expected="samples that keep their row and do not see each other",
        got="other rows once the batch is longer or in another order",
        remedy="do not sort, reorder, centre or compare samples inside the model",
    )


def has_nan(rows: RowMarks) -> bool:
    """Whether some row holds a NaN, which compares as different from nothing."""
    return any(bool(marks_B3.isnan().any()) for calls in rows.values() for marks_B3 in calls)


def _differ(one_B3: Tensor, other_B3: Tensor, share: float = 1.0) -> bool:
    """Whether a mark is further from the other than this share of its tolerance."""
    marks_B, tolerance_B, _ = one_B3.unbind(1)
    return bool(((other_B3[:, 0] - marks_B).abs() > share * tolerance_B).any())


@contextmanager
def _noting(slots: Sequence[Slot], rows: RowMarks, marks_of: _Marker, size: int) -> Iterator[None]:
    with ExitStack() as hooks:
        for slot in slots:

            def note(_: nn.Module, args: Any, kwargs: Any, slot: Slot = slot) -> None:
                if slot.shared_by_batch:
                    return
                found = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
                if found and found[0].numel() and found[0].dim() > slot.batch_axis:
                    x = found[0]
                    if slot.folded and len(x) % size == 0:
                        x = unfolded(x, size)
                    rows.setdefault(slot.index, []).append(marks_of(x, slot.batch_axis))

            handle = slot.module.register_forward_pre_hook(note, with_kwargs=True)
            hooks.callback(handle.remove)
        yield


def _computes_in_half(slots: Sequence[Slot]) -> bool:
    """Whether float32 tensors may be sums of half-precision ones: autocast, half parameters."""
    parameters = [p for slot in slots for p in slot.module.parameters()]
    return any(
        p.dtype in (torch.float16, torch.bfloat16) or torch.is_autocast_enabled(p.device.type)
        for p in parameters
    )


class _Marker:
    """Makes the marks of one forward's tensors; `coarse` where they may come of half precision."""

    def __init__(self, *, coarse: bool) -> None:
        self._coarse = coarse
        # Most layers have rows of one of a few lengths.
        self._weights: dict[tuple[int, torch.dtype, torch.device], Tensor] = {}

    def __call__(self, tensor: Tensor, axis: int) -> Tensor:
        """(B, 3): a fixed odd combination of each row, how far rounding may move it, and N.

        Plain sums would be blind after a normalisation, where every row sums to zero.
        """
        rounding = _TOLERANCE.get(tensor.dtype, _HALF_TOLERANCE)
        tolerance = _HALF_TOLERANCE if self._coarse else rounding
        exact = not tensor.is_floating_point()
        # Half precision stays as it is: a float32 copy of a language model's outputs would be
        # large.
        x_BN = (tensor.double() if exact else tensor).movedim(axis, 0)
        x_BN = x_BN.reshape(tensor.shape[axis], -1)
        marks_B = (x_BN @ self._weights_for(x_BN)).double()
        # A wider type than this one would have PyTorch copy the whole tensor into it.
        wide = torch.float32 if x_BN.dtype in (torch.float16, torch.bfloat16) else x_BN.dtype
        norms_B = torch.linalg.vector_norm(x_BN, dim=1, dtype=wide).double()
        sizes_B = torch.full_like(norms_B, x_BN.shape[1])
        return torch.stack([marks_B, norms_B * (1e-8 if exact else tolerance), sizes_B], 1)

    def _weights_for(self, x_BN: Tensor) -> Tensor:
        key = (x_BN.shape[1], x_BN.dtype, x_BN.device)
        if key not in self._weights:
            numbers_N = torch.arange(x_BN.shape[1], device=x_BN.device).double().cos()
            self._weights[key] = numbers_N.to(x_BN.dtype)
        return self._weights[key]
