"""Which rows of a data set stand there several times, and which two data sets share.

The unit of every claim is one row. Whoever owns k rows has more than k times the ε of one, which
`core/pld.py` prices by the mixture over how many of them join a step. A held-out row that is
trained on as well is not held out. Both are found by comparing rows as they are loaded, for a
limited time; rows whose content is drawn anew at every load (augmentation) compare as different.
"""

from __future__ import annotations

import heapq
import math
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import numpy as np
import torch.utils.data
from torch import Tensor

from shuffled_dpsgd.core.claim import PrivacyClaim
from shuffled_dpsgd.core.plan import PrivacyPlan
from shuffled_dpsgd.runtime.random_states import randomness_kept, seed_all
from shuffled_dpsgd.training.data import MapStyle, PartLoader
from shuffled_dpsgd.training.record_digest import row_digest
from shuffled_dpsgd.training.units import Units

DEFAULT_UNIT = "row"
# Of more rows nothing useful is left, and pricing takes long.
_MOST_ROWS = 32
_RELATIVE_ERROR = 0.01
_SECONDS = 3.0
_AT_ONCE = 64
_IN_SKETCH = 64


@dataclass(frozen=True, kw_only=True)
class Survey:
    """How often the most frequent row stands in a data set, as far as it was looked at.

    `sketch` has the least digests of rows: those of data that share many rows share some of it,
    in whatever order. `extremes` are the least and the largest whole number of every field that has
    one, each with its row.
    """

    largest: int
    compared: int
    total: int
    sketch: frozenset[bytes]
    extremes: Mapping[Hashable, tuple[tuple[int, int], tuple[int, int]]]

    @property
    def looked_at(self) -> str:
        """How much of the data was compared."""
        rows = f"{self.compared:,} of {self.total:,}" if self.compared < self.total else "all"
        return f"{rows} rows compared"


_KNOWN: weakref.WeakKeyDictionary[Any, Survey] = weakref.WeakKeyDictionary()


def survey(data: MapStyle) -> Survey:
    """Count equal rows, and equal indices of the data sets that `data` is made of.

    A data set object is gone through once; a list, which cannot be remembered, every time.
    """
    remembered = isinstance(data, Hashable) and hasattr(data, "__weakref__")
    known = _KNOWN.get(data) if remembered else None
    if known is None or known.total != len(data):
        known = _survey(data)
        if remembered:
            _KNOWN[data] = known
    return known


def _survey(data: MapStyle) -> Survey:
    digests: list[bytes] = []
    extremes: dict[Hashable, tuple[tuple[int, int], tuple[int, int]]] = {}
    for row, record in _records(data):
        digests.append(row_digest(record))
        for key, field in fields_of(record):
            if isinstance(field, Integral) or (isinstance(field, Tensor) and _is_whole(field)):
                found = int(field), row
                least, most = extremes.get(key, (found, found))
                extremes[key] = min(least, found), max(most, found)
    counts = Counter(digests)
    places = np.unique(_places(data, {}), return_counts=True)[1] if _is_made_of(data) else [1]
    largest = max(max(counts.values(), default=1), int(max(places, default=1)))
    return Survey(
        largest=largest,
        compared=len(digests),
        total=len(data),
        sketch=frozenset(heapq.nsmallest(_IN_SKETCH, counts)),
        extremes=extremes,
    )


def shared_rows(training: MapStyle, heldout: MapStyle) -> int:
    """How many rows of `heldout` are rows of `training`, as far as they were looked at."""
    if heldout is training:
        return len(training)
    known = {row_digest(record) for _, record in _records(training)}
    return sum(row_digest(record) in known for _, record in _records(heldout))


def fields_of(record: Any) -> list[tuple[Hashable, Any]]:
    """The parts of a record or a batch that has several, each with its key."""
    if isinstance(record, Mapping):
        return list(record.items())
    return list(enumerate(record)) if isinstance(record, tuple | list) else []


def _is_whole(field: Tensor) -> bool:
    return field.dim() == 0 and not field.is_floating_point()


def _records(data: MapStyle) -> Iterator[tuple[int, Any]]:
    """Rows all over the data, each once, until they are through or time is up."""
    total, until = len(data), time.monotonic() + _SECONDS
    # About the golden section: whatever part of the rows is reached, it is spread over all.
    stride = next((s for s in range(int(total * 0.618) or 1, total) if math.gcd(s, total) == 1), 1)
    loader = PartLoader(data, list)
    at_once = _AT_ONCE if loader.loads_many else 1
    with randomness_kept():
        for start in range(0, total, at_once):
            some = [i * stride % total for i in range(start, min(start + at_once, total))]
            seed_all(0)  # Equal rows are augmented alike.
            yield from zip(some, loader.samples(some), strict=True)
            if time.monotonic() > until:
                return


def _is_made_of(data: Any) -> bool:
    wrappers = (torch.utils.data.Subset, torch.utils.data.ConcatDataset)
    return isinstance(data, wrappers) or getattr(data, "_indices", None) is not None


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
    return _first_place(base, bases) + index


def _first_place(base: Any, bases: dict[int, tuple[int, Any]]) -> int:
    after = sum(len(known) for _, known in bases.values())
    return bases.setdefault(id(base), (after, base))[0]


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
        return f"{named}; no row was found twice ({survey.looked_at})"
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
    claim = claim_for_rows(plan, survey.largest)
    worth = f"no useful ε is left beyond {_MOST_ROWS}" if claim is None else claim.describe()
    return f"{found}; for whoever owns it: {worth}"


def claim_for_rows(plan: PrivacyPlan, rows: int) -> PrivacyClaim | None:
    """The proven claim for a unit of so many rows; None for more than can be priced."""
    if rows > _MOST_ROWS:
        return None
    # Here, because importing a run must not load the accountant.
    from shuffled_dpsgd.core.pld import price

    return PrivacyClaim(
        epsilon=price(plan.mechanism(), plan.delta, _RELATIVE_ERROR, records=rows),
        delta=plan.delta,
        method=f"PLD of a binomial mixture, {rows} rows",
        kind="proven",
        inputs={"rows": rows},
    )
