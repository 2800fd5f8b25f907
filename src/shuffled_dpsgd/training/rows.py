"""Which rows of a data set stand there several times, and which two data sets share.

The unit of every claim is one row. Whoever owns k rows has more than k times the ε of one, which
`core/pld.py` prices by the mixture over how many of them join a step. A held-out row that is
trained on as well is not held out. Both are found by comparing rows as they are loaded, for a
limited time and under the same random numbers.

A field that numbers the rows would hide every copy. So whole numbers and single words that differ
in all rows are left out, where something larger is left to compare, and that is told.
"""

from __future__ import annotations

import heapq
import math
import time
import warnings
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch.utils.data
from torch import Tensor

from shuffled_dpsgd.core.claim import PrivacyClaim
from shuffled_dpsgd.core.plan import PrivacyPlan
from shuffled_dpsgd.runtime.random_states import RandomStates, generators_in, seed_all
from shuffled_dpsgd.training.data import MapStyle, PartLoader
from shuffled_dpsgd.training.record_digest import row_digest
from shuffled_dpsgd.training.units import Units

DEFAULT_UNIT = "row"
# Of more rows pricing takes long; they are worth less still.
_MOST_ROWS = 1024
_RELATIVE_ERROR = 0.01
_SECONDS = 3.0
_AT_ONCE = 64
_IN_SKETCH = 64


_Parts = tuple[bytes, dict[Hashable, int | str]]


@dataclass(frozen=True, kw_only=True)
class Survey:
    """How often the most frequent row stands in a data set, as far as it was looked at.

    `sketch` has the least digests of rows: those of data that share many rows share some of it,
    in whatever order. `extremes` are the least and the largest whole number of every field that has
    any, each with its row. `left_out` are fields that number the rows. Rows that differ from load
    to load cannot be found `again`.
    """

    largest: int
    compared: int
    total: int
    sketch: frozenset[bytes]
    extremes: Mapping[Hashable, tuple[tuple[int, int], ...]]
    left_out: Sequence[Hashable] = ()
    again: bool = True

    @property
    def looked_at(self) -> str:
        """How much of the data was compared."""
        if not self.again:
            return "its rows differ from one load to the next, so content was not compared"
        rows = f"{self.compared:,} of {self.total:,}" if self.compared < self.total else "all"
        without = ", ".join(repr(key) for key in self.left_out)
        return f"{rows} rows compared" + (f", without field {without}" if without else "")


def survey(data: MapStyle) -> Survey:
    """Count equal rows, and equal indices of the data sets that `data` is made of."""
    one, two = (row_digest(next(_records(data), None)) for _ in range(2))
    parts: list[_Parts] = []
    extremes: dict[Hashable, tuple[tuple[int, int], ...]] = {}
    for row, record in _records(data):
        parts.append(_parts(record))
        for key, field in fields_of(record):
            if numbers := _whole_numbers(field):
                known = extremes.get(key, ())
                of_row = (min(numbers), row), (max(numbers), row)
                extremes[key] = min(*known, *of_row), max(*known, *of_row)
    left_out = _numbers(parts)
    rows = [_without(left_out, each) for each in parts]
    places = np.unique(_places(data, {}), return_counts=True)[1]
    return Survey(
        largest=max(max(Counter(rows).values(), default=1), int(places.max(initial=1))),
        compared=len(rows),
        total=len(data),
        sketch=frozenset(heapq.nsmallest(_IN_SKETCH, {*rows})),
        extremes=extremes,
        left_out=left_out,
        again=one == two,
    )


def shared_rows(training: MapStyle, heldout: MapStyle) -> int:
    """How many rows of `heldout` are rows of `training`, as far as they were looked at."""
    if heldout is training:
        return len(training)
    parts = [_parts(record) for _, record in _records(training)]
    left_out = _numbers(parts)
    known = {_without(left_out, each) for each in parts}
    return sum(_without(left_out, _parts(record)) in known for _, record in _records(heldout))


def _parts(record: Any) -> _Parts:
    """A digest of a row without its whole numbers and single words, and these by field."""
    fields = fields_of(record)
    small = {key: value for key, field in fields for value in _single(field)}
    if not small:
        return row_digest(record), small
    large = [(str(key), field) for key, field in fields if key not in small]
    return row_digest(large) if large else b"", small


def _numbers(parts: Sequence[_Parts]) -> list[Hashable]:
    """Fields that number the rows, unless nothing larger is left without them."""
    if len(parts) < 2 or not all(digest for digest, _ in parts):
        return []
    keys = parts[0][1]
    return [key for key in keys if len({small.get(key) for _, small in parts}) == len(parts)]


def _without(left_out: Sequence[Hashable], parts: _Parts) -> bytes:
    """A digest of the whole row but for these fields."""
    digest, small = parts
    rest = [(str(key), value) for key, value in small.items() if key not in left_out]
    return row_digest((digest, rest)) if rest else digest


def fields_of(record: Any) -> list[tuple[Hashable, Any]]:
    """The parts of a record or a batch that has several, each with its key."""
    if not isinstance(record, Mapping | tuple | list):
        return []
    parts = record.items() if isinstance(record, Mapping) else enumerate(record)
    inside = [(key, part, isinstance(part, Mapping | tuple)) for key, part in parts]
    return [
        field
        for key, part, is_made_of in inside
        for field in ([((key, k), v) for k, v in fields_of(part)] if is_made_of else [(key, part)])
    ]


def _single(field: Any) -> list[Any]:
    """A whole number or a word."""
    if isinstance(field, str):
        return [field] if len(field.split()) == 1 else []
    is_row = isinstance(field, list) or getattr(field, "ndim", 0) != 0
    return [] if is_row else _whole_numbers(field)


def _whole_numbers(field: Any) -> list[Any]:
    """A whole number or a row of them; nothing for anything else."""
    if isinstance(field, Tensor | np.ndarray | np.generic):
        is_row = field.ndim < 2 and str(field.dtype).startswith(("torch.int", "int", "uint"))
        found = field.reshape(-1).tolist() if is_row else []
    else:
        found = field if isinstance(field, list) else [field]
    return found if all(type(each) is int for each in found) else []


def _records(data: MapStyle) -> Iterator[tuple[int, Any]]:
    """Rows all over the data, each once, until they are through or time is up."""
    total, until = len(data), time.monotonic() + _SECONDS
    # About the golden section: whatever part of the rows is reached, it is spread over all.
    stride = next((s for s in range(int(total * 0.618) or 1, total) if math.gcd(s, total) == 1), 1)
    loader = PartLoader(data, list)
    at_once = _AT_ONCE if loader.loads_many else 1
    own = generators_in([data], 4)
    states = RandomStates.now(own)
    try:
        for start in range(0, total, at_once):
            some = [i * stride % total for i in range(start, min(start + at_once, total))]
            if own:  # Equal rows are augmented alike.
                states.restore()
            seed_all(0)
            yield from zip(some, loader.samples(some), strict=True)
            if time.monotonic() > until:
                return
    finally:
        states.restore()


def _places(data: Any, bases: dict[int, tuple[int, Any]]) -> np.ndarray:
    """Where each row comes from, as one number.

    `bases` has the data sets at the bottom, each with the number of its first row.
    """
    if isinstance(data, torch.utils.data.Subset):
        return _places(data.dataset, bases)[np.asarray(data.indices, dtype=np.int64)]
    if isinstance(data, torch.utils.data.ConcatDataset):
        return np.concatenate([_places(part, bases) for part in data.datasets])
    # A `datasets.Dataset` keeps what was selected as a table of indices.
    chosen: Any = getattr(data, "_indices", None)
    if chosen is not None and hasattr(chosen, "column"):
        index, base = np.asarray(chosen.column(0).to_numpy(), dtype=np.int64), data._data
    else:
        index, base = np.arange(len(data), dtype=np.int64), getattr(data, "_data", data)
    after = sum(len(known) for _, known in bases.values())
    return bases.setdefault(id(base), (after, base))[0] + index


def describe_unit(
    plan: PrivacyPlan, unit: str, survey: Survey | None, units: Units | None = None
) -> str:
    """What the card says of the unit: its name, and the ε of the row that is there most often."""
    if plan.records_per_unit:
        found = "" if units is None else f", {units.num_records:,} records in all"
        one = "one unit" if unit == DEFAULT_UNIT else f"one {unit}"
        return (
            f"{one}: all of its records together; {plan.dataset_size:,} of them{found}, "
            f"{plan.records_per_unit} of one in a step at most"
        )
    named = "one row" if unit == DEFAULT_UNIT else f"one {unit}, as stated: one row each"
    if survey is None:
        return named
    if survey.largest == 1:
        found = "no row was found twice" if survey.again else "nobody looked for equal rows"
        return f"{named}; {found} ({survey.looked_at})"
    return f"{named}; {_repeated(plan, survey)}"


def warn_of_repeats(plan: PrivacyPlan, survey: Survey) -> None:
    """Say before the first release that some rows are worth less protection."""
    if survey.largest > 1 and not plan.uncertifiable:
        warnings.warn(
            f"{_repeated(plan, survey)}. Remove repeated rows; draw views, chunks and balanced "
            "classes inside __getitem__",
            UserWarning,
            stacklevel=5,
        )


def _repeated(plan: PrivacyPlan, survey: Survey) -> str:
    found = f"the most frequent row is there {survey.largest} times ({survey.looked_at})"
    if plan.uncertifiable:
        return found
    priced = min(survey.largest, _MOST_ROWS)
    more = f", and worse: this is for {priced:,}" if priced < survey.largest else ""
    return f"{found}; for whoever owns it: {claim_for_rows(plan, priced).describe()}{more}"


def claim_for_rows(plan: PrivacyPlan, rows: int) -> PrivacyClaim:
    """The proven claim for a unit of so many rows."""
    # Here, because importing a run must not load the accountant.
    from shuffled_dpsgd.core.pld import price

    return PrivacyClaim(
        epsilon=price(plan.mechanism(), plan.delta, _RELATIVE_ERROR, records=rows),
        delta=plan.delta,
        method=f"PLD of a binomial mixture, {rows} rows",
        kind="proven",
        inputs={"rows": rows},
    )
