"""How a logical batch is divided into physical batches, with little padding.

Samples of similar length share a physical batch. With `pads`, a run uses a few fixed shapes, chosen
once: copies of samples, which do not count, fill the rest of a batch. Fixed shapes are faster on a
GPU. The division changes what is released by rounding only.
"""

from __future__ import annotations

import bisect
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# The fixed cost of a physical batch, in tokens of a small Transformer: mostly launches. On an
# H200, MiniLM took 15,900 to 17,500 samples a second in two batches a step and 11,700 in three
# (16 November 2026).
TOKENS_PER_BATCH = {"cpu": 256, "cuda": 32768}
# Planned batches hold draws this many standard deviations above the expected one.
HEAD_ROOM = 2.0
# A batch that is not full has one of this many sizes.
NUM_SIZES = 8
_MULTIPLE = 8
_ENDS = (64, 128)


@dataclass(frozen=True, kw_only=True)
class Part:
    """One physical batch: records to load, how many of them count, and the length to pad to.

    The first `counted` samples count. `length` is None where it is the collate function's business.
    Where units are drawn, a sample has `rows_per_sample` records, each with its weight in the mean.
    """

    records: tuple[int, ...]
    counted: int
    length: int | None = None
    rows_per_sample: int = 1
    weights: tuple[float, ...] = ()

    @property
    def samples(self) -> int:
        """How many samples the records make."""
        return len(self.records) // self.rows_per_sample


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Batches of up to `size` samples of up to `length` tokens; `room` samples use this shape."""

    length: int
    size: int
    room: float


def length_class(length: int) -> int:
    """The length that samples of `length` tokens are padded to.

    >>> [length_class(n) for n in (1, 8, 9, 65, 129)]
    [8, 8, 16, 80, 160]
    """
    step = _MULTIPLE * (1 << bisect.bisect_left(_ENDS, length))
    return math.ceil(length / step) * step


def lengths_of(data: Any) -> Sequence[int] | None:
    """The length of every record; None if it is not cheaply known, or if all are equally long.

    Known from a method `length(index)` of the data set, from a column `input_ids` of a Hugging Face
    data set, and from `input_ids` in the records of a list.
    """
    found: list[int] | None = None
    if callable(getattr(data, "length", None)):
        found = [*map(int, map(data.length, range(len(data))))]
    elif "input_ids" in (getattr(data, "column_names", None) or ()):
        if data.format["type"] != "custom":
            found = _arrow_lengths(data)
    elif isinstance(data, list | tuple) and all(_has_tokens(record) for record in data):
        found = [len(record["input_ids"]) for record in data]
    return found if found and min(found) < max(found) else None


def _arrow_lengths(data: Any) -> list[int]:
    """From the offsets that Arrow keeps: no record is decoded."""
    from pyarrow import compute

    lengths = compute.list_value_length(data.with_format("arrow")["input_ids"])
    found: list[int] = lengths.to_numpy().tolist()
    return found


def _has_tokens(record: Any) -> bool:
    return isinstance(record, Mapping) and "input_ids" in record


class Layout:
    """Divides logical batches into physical ones of at most `batch_size` samples.

    With `pads`, batches are filled with copies of one of their own samples, which do not count.
    `lengths` are those of all records, or None. `expected` is the expected size of a logical batch.
    No batch is padded beyond `max_length`, the model's positions, or else the longest record. Where
    no logical batch has more than `most` samples, there is one shape alone.
    """

    def __init__(
        self,
        *,
        batch_size: int,
        expected: int,
        lengths: Sequence[int] | None = None,
        pads: bool = False,
        device: str = "cpu",
        max_length: int | None = None,
        most: int | None = None,
    ) -> None:
        self._batch_size = batch_size
        self._lengths = lengths
        self.pads = pads
        self._max_length = max_length or 0
        self._most = most
        self._tokens_per_batch = TOKENS_PER_BATCH.get(device, TOKENS_PER_BATCH["cuda"])
        self.shapes: tuple[Shape, ...] = self._planned(expected) if pads else ()

    def parts(self, drawn: Sequence[int]) -> list[Part]:
        """The physical batches of one logical batch; every record of it counts exactly once."""
        if self._lengths is None:
            size = self.shapes[0].size if self.pads else self._batch_size
            return [self._part(chunk, size, None) for chunk in _chunks(drawn, size)]
        lengths = self._lengths
        ordered = sorted(drawn, key=lambda record: (lengths[record], record))
        return self._filled(ordered) if self.pads else self._cut(ordered)

    def _filled(self, ordered: Sequence[int]) -> list[Part]:
        """Into the fixed shapes: what does not fit into one goes to the next longer one."""
        assert self._lengths is not None
        parts, rest = [], ordered
        for shape in self.shapes:
            is_last = shape is self.shapes[-1]
            fit = bisect.bisect_right(rest, shape.length, key=self._lengths.__getitem__)
            taken = len(rest) if is_last else min(fit, math.ceil(shape.room))
            chunks = _chunks(rest[:taken], shape.size)
            parts += [self._part(chunk, shape.size, shape.length) for chunk in chunks]
            rest = rest[taken:]
        return parts

    def _cut(self, ordered: Sequence[int]) -> list[Part]:
        """Into the cheapest division of this batch, without copies."""
        lengths = self._lengths
        assert lengths is not None
        counts = Counter(length_class(lengths[record]) for record in ordered)
        classes = sorted(counts)
        parts, first = [], 0
        for start, end in cheapest_cuts(
            classes, [counts[c] for c in classes], lambda n, length, _: self._cost(n, length)
        ):
            taken = sum(counts[c] for c in classes[start:end])
            group = ordered[first : first + taken]
            size = _even(taken, self._batch_size)
            parts += [Part(records=tuple(c), counted=len(c)) for c in _chunks(group, size)]
            first += taken
        return parts

    def _part(self, chunk: Sequence[int], size: int, length: int | None) -> Part:
        copies = 0
        if self.pads and len(chunk) < size:
            step = size if self._most is not None else _round_up(size / NUM_SIZES)
            copies = min(size, math.ceil(len(chunk) / step) * step) - len(chunk)
        records = (*chunk, *[chunk[0]] * copies)
        return Part(records=records, counted=len(chunk), length=length)

    def _planned(self, expected: int) -> tuple[Shape, ...]:
        """The cheapest shapes for an expected batch; the last has room for larger batches."""
        extra = HEAD_ROOM * math.sqrt(expected)
        if self._most is not None:
            longest = max(self._lengths or (0,))
            return (self._shape(self._most, length_class(longest) if longest else 0),)
        if self._lengths is None:
            return (self._shape(expected + extra, 0),)
        share = expected / len(self._lengths)
        longest = max(max(self._lengths), self._max_length // _MULTIPLE * _MULTIPLE)
        counts: Counter[int] = Counter()
        # There are many records and few lengths.
        for length, count in Counter(self._lengths).items():
            counts[min(length_class(length), longest)] += count
        classes = sorted(counts)
        expectations = [share * counts[c] for c in classes]

        def room(count: float, *, is_last: bool) -> float:
            return count + extra if is_last else count

        cuts = cheapest_cuts(
            classes,
            expectations,
            lambda count, length, is_last: self._cost(room(count, is_last=is_last), length),
        )
        return tuple(
            self._shape(
                room(sum(expectations[start:end]), is_last=end == len(classes)), classes[end - 1]
            )
            for start, end in cuts
        )

    def _shape(self, room: float, length: int) -> Shape:
        size = min(self._batch_size, _round_up(_even(math.ceil(room), self._batch_size)))
        return Shape(length=length, size=size, room=max(room, 1.0))

    def _cost(self, count: float, length: int) -> float:
        """The cost, in tokens, of `count` samples padded to `length`."""
        batches = math.ceil(count / self._batch_size)
        return batches * self._tokens_per_batch + count * length


def cheapest_cuts(
    lengths: Sequence[int],
    counts: Sequence[float],
    cost: Callable[[float, int, bool], float],
) -> list[tuple[int, int]]:
    """Divide ascending lengths into groups of least total cost, as (start, end) indices.

    `cost(count, length, is_last)` is that of one group, padded to its longest length.

    >>> cheapest_cuts([8, 16, 64], [90, 10, 5], lambda n, length, _: 500 + n * length)
    [(0, 1), (1, 3)]
    """
    best: list[tuple[float, int]] = [(0.0, 0)]
    for end in range(1, len(lengths) + 1):
        is_last = end == len(lengths)
        found = [
            (best[start][0] + cost(sum(counts[start:end]), lengths[end - 1], is_last), start)
            for start in range(end)
        ]
        best.append(min(found))
    cuts, end = [], len(lengths)
    while end:
        start = best[end][1]
        cuts.append((start, end))
        end = start
    return cuts[::-1]


def _chunks(records: Sequence[int], size: int) -> list[Sequence[int]]:
    return [records[start : start + size] for start in range(0, len(records), size)]


def _even(count: int, at_most: int) -> int:
    """The size of the parts when `count` is divided evenly into parts of at most `at_most`."""
    return math.ceil(count / max(1, math.ceil(count / at_most)))


def _round_up(size: float) -> int:
    return max(1, math.ceil(size / _MULTIPLE)) * _MULTIPLE
