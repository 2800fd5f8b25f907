"""Does a data set make an item of one record alone? Its other records are exchanged, to see.

`__getitem__` may return another record when one is broken, or draw a second one to mix with. Then a
record is in several rows of a batch. A copy of the data set, in which the lists and arrays of
records have other records at all other places, must give the same items under the same random
numbers. So must what is inside a subset, a data set of several parts or one that wraps another. Of
data sets that hold no such list (records on disk, a stream of files) nobody can tell.
"""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset

from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.runtime.random_states import Own, RandomStates, seed_all
from shuffled_dpsgd.training.data import MapStyle
from shuffled_dpsgd.training.record_digest import same

_MOST_BYTES = 1 << 30
_MOST_GROUPS, _TRIED, _STATES = 8, 4, 16
# Besides the records of a part: a few; and many before the first release, for what happens to one
# record of a hundred, as long as that takes little time.
_BESIDES, _MANY, _SECONDS = 32, 1024, 2.0
# Where more items than this share change, an array may lie in another order than the records.
_IN_ORDER = 0.6


def check_records_alone(
    data: MapStyle,
    records: Sequence[int],
    draws: random.Random,
    own: Sequence[Own],
    *,
    thorough: bool = False,
) -> bool:
    """Compare items with those of a data set that has other records at all other places.

    Besides the `records` others are tried, many if `thorough`, so that one item that changes can be
    told from a list that lies in another order than the records. `own` are generators besides the
    shared ones. Returns whether the records could be exchanged.

    Raises:
        InvalidArgumentError: the item of one record changes with the others.
    """
    if type(data) in (list, tuple) or _is_table(data):
        return True  # Item i is record i, or is made of row i alone.
    size, until = len(data), time.perf_counter() + _SECONDS
    others = draws.sample(range(size), min(_MANY if thorough else _BESIDES, size))
    tried = [*dict.fromkeys([*records, *others])]
    first = {*tried[: len({*records}) + _BESIDES]}
    draws.shuffle(tried)
    most = max(1, size // 8)
    groups = [tried[first : first + most] for first in range(0, len(tried), most)][:_MOST_GROUPS]
    states = RandomStates.now(own)

    def changes(record: int, neighbour: Any, *, is_needed: bool) -> bool:
        """Whether an item differs between two data sets, under the same random numbers."""
        seed, items = draws.getrandbits(32), []
        try:
            for each in (data, neighbour):
                states.restore()
                seed_all(seed)
                items.append(each[record])
        except Exception:  # Others than those of the batch may be such that cannot be loaded.
            if is_needed:
                raise
            return False
        return not same(*items)

    changed: list[tuple[int, list[int]]] = []
    num_tried = 0
    for group in groups:
        neighbour = _exchanged(data, group, draws)
        if neighbour is None:
            return False
        for record in group:
            if record not in first and time.perf_counter() > until:
                continue
            num_tried += 1
            if changes(record, neighbour, is_needed=record in records):
                changed.append((record, group))
    if changed and len(changed) < _IN_ORDER * num_tried:
        raise _refusal(changed[0][0])
    for record, group in changed[:_TRIED]:
        half = _exchanged(data, [*group, *draws.sample(range(size), size // 2)], draws)
        times = sum(changes(record, half, is_needed=True) for _ in range(_STATES))
        if 0 < times < _STATES:
            # It depends on the others: a list in another order would change always or never.
            raise _refusal(record)
    return True


def _exchanged(data: Any, kept: Sequence[int], draws: random.Random) -> Any:
    """A copy of the data set with its records in another order, or None if it has none to exchange.

    The `kept` places keep their record; at all others they change places with each other.
    """
    order = _order(len(data), kept, draws)
    if _is_table(data):
        return data.select(order, keep_in_memory=True)
    if type(data) in (list, tuple):
        return type(data)(data[source] for source in order)
    held = dict(getattr(data, "__dict__", {}))
    if isinstance(data, Subset):
        inside = _exchanged(data.dataset, [data.indices[at] for at in kept], draws)
        replaced = {"dataset": inside}
    elif isinstance(data, ConcatDataset):
        first, parts = 0, []
        part: Any
        for part in data.datasets:
            places = [at - first for at in kept if 0 <= at - first < len(part)]
            parts.append(_exchanged(part, places, draws))
            first += len(part)
        replaced = {"datasets": None if any(part is None for part in parts) else parts}
    else:
        replaced = {
            name: _exchanged(value, kept, draws)
            if _is_data(value, len(order))
            else _reordered(value, order)
            for name, value in held.items()
        }
    replaced = {name: value for name, value in replaced.items() if value is not None}
    if not replaced:
        return None
    try:
        neighbour = copy.copy(data)
        vars(neighbour).update(replaced)
    except Exception:  # A class that does not let itself be copied.
        return None
    return neighbour


def _order(size: int, kept: Sequence[int], draws: random.Random) -> list[int]:
    """Which record each place gets: its own at those `kept`, another at all others."""
    order = np.roll(np.arange(size), draws.randrange(1, size)) if size > 1 else np.arange(size)
    order[list(kept)] = kept
    found: list[int] = order.tolist()
    return found


def _is_table(data: Any) -> bool:
    """Whether this is a table of the library `datasets`."""
    return hasattr(data, "select") and hasattr(data, "with_transform")


def _is_data(value: Any, size: int) -> bool:
    """Whether something is another data set of as many records."""
    plain = isinstance(value, list | tuple | dict | str | bytes | Tensor | np.ndarray)
    is_sized = hasattr(type(value), "__getitem__") and hasattr(type(value), "__len__")
    return is_sized and not plain and len(value) == size


def _reordered(value: Any, order: list[int], depth: int = 0) -> Any:
    """The records of a list or an array in this order, or of those in a short one; else None."""
    size = len(order)
    if isinstance(value, Tensor | np.ndarray):
        fits = len(value.shape) > 0 and value.shape[0] == size and value.nbytes <= _MOST_BYTES
        return value[order] if fits else None
    if type(value) in (list, tuple) and len(value) == size and size > 8:
        return type(value)(value[source] for source in order)
    if depth or type(value) not in (list, tuple, dict) or len(value) > 64:
        return None
    pairs = value.items() if type(value) is dict else enumerate(value)
    parts = {key: (part, _reordered(part, order, 1)) for key, part in pairs}
    if all(new is None for _, new in parts.values()):
        return None
    found = {key: old if new is None else new for key, (old, new) in parts.items()}
    return found if type(value) is dict else type(value)(found.values())


def _refusal(record: int) -> InvalidArgumentError:
    return InvalidArgumentError(
        "data",
        expected="the item of a record to be made of that record alone",
        got=f"an item {record} that changes when other records of the data set are exchanged, "
        "under the same random numbers",
        remedy="do not return another record for one that is broken (leave it out of the data "
        "set), and do not draw a second one: a record would be in several rows of a batch",
    )
