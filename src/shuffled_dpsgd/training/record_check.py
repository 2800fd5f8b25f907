"""Does a data set make an item of one record alone? Its other records are exchanged, to see.

`__getitem__` may return another record when one is broken, or draw a second one to mix with. Then a
record is in several rows of a batch. A copy of the data set, in which the lists and arrays of
records have other records at all other places, must give the same items under the same random
numbers. Data sets that hold no such list (a table on disk, a stream of files) are passed over.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shuffled_dpsgd.clipping.checks.random_states import RandomStates, generators_in, seed_all
from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.training.data import PartLoader
from shuffled_dpsgd.training.equal_rows import same

_MOST_BYTES = 1 << 30
_BESIDES, _MOST_GROUPS, _TRIED, _STATES = 32, 8, 4, 16
# Where more items than this share change, an array may lie in another order than the records.
_IN_ORDER = 0.6


def check_records_alone(
    loader: PartLoader, records: Sequence[int], seed: int, draws: random.Random
) -> None:
    """Compare items with those of a data set that has other records at all other places.

    Besides the `records` a few others are tried, so that one item that changes can be told from a
    list that lies in another order than the records.

    Raises:
        InvalidArgumentError: the item of one record changes with the others.
    """
    data, size = loader.data, len(loader.data)
    some = sorted({*records, *draws.sample(range(size), min(_BESIDES, size))})
    draws.shuffle(some)
    most = max(1, size // 8)
    groups = [some[first : first + most] for first in range(0, len(some), most)][:_MOST_GROUPS]
    changed: list[tuple[int, list[int]]] = []
    for group in groups:
        neighbour = _exchanged(data, _order(size, group, draws))
        if neighbour is None:
            return
        changed += [(record, group) for record in _changed(data, neighbour, group, seed, records)]
    if changed and len(changed) < _IN_ORDER * sum(map(len, groups)):
        raise _refusal(changed[0][0])
    for record, group in changed[:_TRIED]:
        half = _exchanged(
            data, _order(size, [*group, *draws.sample(range(size), size // 2)], draws)
        )
        times = sum(
            len(_changed(data, half, [record], seed + 1 + state, records))
            for state in range(_STATES)
        )
        if 0 < times < _STATES:
            # What lies in another order would change every time or never.
            raise _refusal(record)


def _changed(
    data: Any, neighbour: Any, group: Sequence[int], seed: int, records: Sequence[int]
) -> list[int]:
    """Which items differ between two data sets, under the same random numbers.

    Records that are not in the batch may be such that cannot be loaded.
    """
    own = RandomStates.with_own(generators_in([data], 4), torch.device("cpu"))
    found = []
    for record in group:
        try:
            one, two = (_item(each, record, seed, own) for each in (data, neighbour))
        except Exception:
            if record in records:
                raise
            continue
        if not same(one, two):
            found.append(record)
    return found


def _item(data: Any, record: int, seed: int, own: RandomStates) -> Any:
    """One item, under random numbers of its own."""
    own.restore()
    seed_all((seed + 7919 * record) % 2**32)
    return data[record]


def _order(size: int, kept: Sequence[int], draws: random.Random) -> list[int]:
    """Some places keep their record; at all others they change places with each other."""
    order, fixed = list(range(size)), set(kept)
    others = [place for place in order if place not in fixed]
    draws.shuffle(others)
    for place, source in zip(others, [*others[1:], *others[:1]], strict=True):
        order[place] = source
    return order


def _exchanged(data: Any, order: list[int]) -> Any:
    """A copy of the data set with its lists and arrays of records in another order, if any."""
    own = getattr(data, "__dict__", None)
    if not own or isinstance(data, list | tuple):
        return None
    replaced = {name: _reordered(value, order) for name, value in own.items()}
    replaced = {name: value for name, value in replaced.items() if value is not None}
    if not replaced:
        return None
    try:
        neighbour = copy.copy(data)
        vars(neighbour).update(replaced)
    except Exception:  # A class that does not let itself be copied.
        return None
    return neighbour


def _reordered(value: Any, order: list[int], depth: int = 0) -> Any:
    size = len(order)
    if isinstance(value, Tensor | np.ndarray):
        fits = len(value.shape) > 0 and value.shape[0] == size and value.nbytes <= _MOST_BYTES
        return value[order] if fits else None
    if type(value) in (list, tuple):
        if len(value) == size and size > 8:
            return type(value)(value[source] for source in order)
        if depth == 0 and len(value) <= 8:
            parts = [_reordered(part, order, 1) for part in value]
            if any(part is not None for part in parts):
                pairs = zip(value, parts, strict=True)
                return type(value)(old if new is None else new for old, new in pairs)
    if type(value) is dict and depth == 0 and len(value) <= 64:
        found = {key: _reordered(part, order, 1) for key, part in value.items()}
        if any(part is not None for part in found.values()):
            return {key: value[key] if new is None else new for key, new in found.items()}
    return None


def _refusal(record: int) -> InvalidArgumentError:
    return InvalidArgumentError(
        "data",
        expected="the item of a record to be made of that record alone",
        got=f"an item {record} that changes when other records of the data set are exchanged, "
        "under the same random numbers",
        remedy="do not return another record for one that is broken (leave it out of the data "
        "set), and do not draw a second one: a record would be in several rows of a batch",
    )
