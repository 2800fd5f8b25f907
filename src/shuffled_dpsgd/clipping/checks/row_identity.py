"""Checks that row i of every layer's input and of the outputs belongs to sample i, and to it alone.

A model that sorts its batch by length, flips or rolls it, centres it or divides it by its largest
entry keeps every shape: but then one layer's row i is another layer's row j, norms are added up
across samples, and a sample may contribute more than its bound. With one sample added at the end of
the batch, no other row may change; with the batch back to front, the same rows must come back to
front; and each half of the batch must give by itself what it gives beside the other. Each of the
above breaks one of the three.

Shapes: B samples, N all other elements of a tensor.

What a forward leaves behind of every tensor is computed on its device and brought to the host once
the forward is over. There are hundreds of tensors, and waiting for each would take longer than the
forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shuffled_dpsgd.clipping.capture.batch_size import first_tensor
from shuffled_dpsgd.clipping.capture.slot import Slot, unfolded
from shuffled_dpsgd.errors import UnsupportedModuleError

# Relative to the length of a row; wider than what another batch size does to rounding.
_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3}
_HALF_TOLERANCE = 0.1
# The share of that tolerance by which two runs of one batch may differ before the model counts as
# random. It is small, because two runs show less of the randomness than all that are compared.
_REPEATED = 0.1

OUTPUTS = -1
# Outputs without axes: the mean or the sum of the samples' losses, if they are to be trained on.
NUMBERS = -2


@dataclass(frozen=True, kw_only=True)
class Marks:
    """What is kept of a tensor, on the host: a number of each row, and what rounding may do to it.

    `row_size` is N.
    """

    marks_B: npt.NDArray[np.float64]
    tolerances_B: npt.NDArray[np.float64]
    row_size: int

    def __len__(self) -> int:
        return len(self.marks_B)

    def __getitem__(self, rows: slice) -> Marks:
        """The marks of some rows, such as `[::-1]` for the rows back to front."""
        return Marks(
            marks_B=self.marks_B[rows],
            tolerances_B=self.tolerances_B[rows],
            row_size=self.row_size,
        )

    def have_nan(self) -> bool:
        return bool(np.isnan(self.marks_B).any() or np.isnan(self.tolerances_B).any())


# By slot, or one of the names above: the marks of every call.
RowMarks = dict[int, list[Marks]]
# By length, type and device: what rows are combined with.
Weights = dict[tuple[int, torch.dtype, torch.device], Tensor]


def rows_of(
    slots: Sequence[Slot], forward: Callable[[], Any], size: int, weights: Weights | None = None
) -> RowMarks:
    """Marks for every call and every output of a forward.

    All rows of one of the `size` samples count as one where a slot's inputs are folded. Several
    forwards may share `weights`.
    """
    noted: dict[int, list[_Noted]] = {}
    marks_of = _Marker(coarse=_computes_in_half(slots), weights=weights)
    with _noting(slots, noted, marks_of, size):
        output = forward()
    leaves = [x for x in tree_leaves(output) if isinstance(x, Tensor) and x.dim() > 0]
    noted[OUTPUTS] = [marks_of(leaf, 0) for leaf in leaves if leaf.numel()]
    numbers = [leaf.detach().view(1, 1) for leaf in numbers_in(output)]
    noted[NUMBERS] = [marks_of(number, 0) for number in numbers]
    return _brought_to_host(noted)


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
        value, a, b = (float(marks.marks_B[0]) for marks in (whole, *both))
        off = min(abs(a + b - value), abs((first * a + second * b) / size - value))
        if off > _REPEATED * float(whole.tolerances_B[0]):
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
        for call, (rows, (more, reverse)) in enumerate(zip(calls, others, strict=False)):
            if (len(rows), len(more), len(reverse)) != (size, size + 1, size):
                continue
            if _differ(rows, more[:size]) or _differ(rows, reverse[::-1]):
                return index
            if halves is not None and _halves_differ(rows, halves, index, call):
                return index
    return None


def _halves_differ(rows: Marks, halves: tuple[RowMarks, RowMarks], index: int, call: int) -> bool:
    """Whether a half of the batch, run by itself, has other rows.

    Halves of another size are passed over: a model may cut off what is padding for all samples.
    """
    parts = [half.get(index, [])[call : call + 1] for half in halves]
    if not all(parts):
        return False
    (first,), (second,) = parts
    same_size = all(part.row_size == rows.row_size for part in (first, second) if len(part))
    if not same_size or len(first) + len(second) != len(rows):
        return False
    return _differ(rows[: len(first)], first) or _differ(rows[len(first) :], second)


def repeats(one: RowMarks, other: RowMarks) -> bool:
    """Whether two runs of one batch agree: a model that draws random numbers does not."""
    return not any(
        len(a) == len(b) and _differ(a, b, _REPEATED)
        for index, calls in one.items()
        for a, b in zip(calls, other.get(index, []), strict=False)
    )


def row_differs(one: RowMarks, other: RowMarks, row: int, size: int) -> bool:
    """Whether another run disagrees about one sample of `size`, wherever the first has that many.

    Tensors of another length in the first run have no batch axis and are passed over.
    """
    return any(
        len(a) != len(b) or _differ(a[row : row + 1], b[row : row + 1])
        for index, calls in one.items()
        for a, b in zip(calls, other.get(index, []), strict=False)
        if len(a) == size
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
    return any(marks.have_nan() for calls in rows.values() for marks in calls)


def _differ(one: Marks, other: Marks, share: float = 1.0) -> bool:
    """Whether a mark is further from the other than this share of its tolerance."""
    with np.errstate(invalid="ignore", over="ignore"):
        off_B = np.abs(other.marks_B - one.marks_B)
        return bool((off_B > share * one.tolerances_B).any())


@dataclass(frozen=True, kw_only=True)
class _Noted:
    """What becomes `Marks`, still on the device; tolerances are so much of a row's length."""

    marks_B: Tensor
    lengths_B: Tensor
    tolerance: float
    row_size: int


def _brought_to_host(noted: dict[int, list[_Noted]]) -> RowMarks:
    """All marks of a forward; the host waits once for each device."""
    by_device: dict[torch.device, list[_Noted]] = {}
    for calls in noted.values():
        for each in calls:
            by_device.setdefault(each.marks_B.device, []).append(each)
    found: dict[int, Marks] = {}
    for some in by_device.values():
        # Types may differ; joining them takes the widest, which changes no number.
        marks = torch.cat([each.marks_B for each in some]).double()
        lengths = torch.cat([each.lengths_B for each in some]).double()
        together = torch.stack([marks, lengths]).cpu().numpy()
        first = 0
        for each in some:
            here = slice(first, first + len(each.marks_B))
            first = here.stop
            found[id(each)] = Marks(
                marks_B=together[0, here],
                tolerances_B=together[1, here] * each.tolerance,
                row_size=each.row_size,
            )
    return {index: [found[id(each)] for each in calls] for index, calls in noted.items()}


@contextmanager
def _noting(
    slots: Sequence[Slot], noted: dict[int, list[_Noted]], marks_of: _Marker, size: int
) -> Iterator[None]:
    with ExitStack() as hooks:
        for slot in slots:

            def note(_: nn.Module, args: Any, kwargs: Any, slot: Slot = slot) -> None:
                if slot.shared_by_batch:
                    return
                x = first_tensor(args, kwargs)
                if x is None:
                    return
                with _unnoticed(x):
                    if x.numel() and x.dim() > slot.batch_axis:
                        if slot.folded and len(x) % size == 0:
                            x = unfolded(x, size)
                        noted.setdefault(slot.index, []).append(marks_of(x, slot.batch_axis))

            handle = slot.module.register_forward_pre_hook(note, with_kwargs=True)
            hooks.callback(handle.remove)
        yield


def _unnoticed(tensor: Tensor) -> AbstractContextManager[object]:
    """Operations on it are seen by no mode of the check's own, which would see every one of them.

    Tensors of other kinds may need their own functions.
    """
    is_plain = type(tensor) in (Tensor, nn.Parameter)
    return torch._C.DisableTorchFunction() if is_plain else nullcontext()


def _computes_in_half(slots: Sequence[Slot]) -> bool:
    """Whether float32 tensors may be sums of half-precision ones: autocast, half parameters."""
    return any(
        p.dtype in (torch.float16, torch.bfloat16) or torch.is_autocast_enabled(p.device.type)
        for slot in slots
        for p in slot.module.parameters()
    )


class _Marker:
    """Makes the marks of one forward's tensors; `coarse` where they may come of half precision."""

    def __init__(self, *, coarse: bool, weights: Weights | None = None) -> None:
        self._coarse = coarse
        # Most layers have rows of one of a few lengths.
        self._weights: Weights = {} if weights is None else weights

    def __call__(self, tensor: Tensor, axis: int) -> _Noted:
        """A fixed odd combination of each row, and the row's length.

        Plain sums would be blind after a normalisation, where every row sums to zero.
        """
        rounding = _TOLERANCE.get(tensor.dtype, _HALF_TOLERANCE)
        tolerance = _HALF_TOLERANCE if self._coarse else rounding
        exact = not tensor.is_floating_point()
        # Half precision stays as it is: a float32 copy of a language model's outputs would be
        # large.
        x_BN = tensor.double() if exact else tensor
        x_BN = x_BN.movedim(axis, 0) if axis else x_BN
        x_BN = x_BN.reshape(len(x_BN), -1)
        # A wider type than this one would have PyTorch copy the whole tensor into it.
        wide = torch.float32 if x_BN.dtype in (torch.float16, torch.bfloat16) else x_BN.dtype
        return _Noted(
            marks_B=x_BN @ self._weights_for(x_BN),
            lengths_B=torch.linalg.vector_norm(x_BN, dim=1, dtype=wide),
            tolerance=1e-8 if exact else tolerance,
            row_size=x_BN.shape[1],
        )

    def _weights_for(self, x_BN: Tensor) -> Tensor:
        key = (x_BN.shape[1], x_BN.dtype, x_BN.device)
        if key not in self._weights:
            numbers_N = torch.arange(x_BN.shape[1], device=x_BN.device).double().cos()
            self._weights[key] = numbers_N.to(x_BN.dtype)
        return self._weights[key]
