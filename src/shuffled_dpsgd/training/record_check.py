"""Is an item of a data set made of one record alone? Other records are exchanged, to see.

`__getitem__` may return another record when one is broken, draw a second one to mix with, or centre
by all of them. Then a record is in several items, and no clip bounds what it contributes. So copies
of the data set are made in which the lists and arrays of records have others at other places, and
the same items are loaded under the same random numbers.

In most data sets item i is made of place i of each list. Then nothing may change once all other
places are exchanged. Where an item does change, its list may lie in another order. So random halves
of the list are exchanged: of an item that is made of one place, all halves that change it have that
place in common. A place of its own is what every item must have.

Nobody can tell of what an item takes from elsewhere, such as files or a cache. So all places are
given one and the same record: items that differ even then are not made of these lists alone.
"""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Mapping, Sequence
from types import CellType, FunctionType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset

from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.runtime.random_states import Own, RandomStates, seed_all
from shuffled_dpsgd.training.data import MapStyle
from shuffled_dpsgd.training.record_digest import leaves, same

_MOST_BYTES = 1 << 30
_FEWEST, _MOST_PARTS, _DEPTH = 9, 64, 6
# Besides the records of a part: a few; and many before the first release, for what happens to one
# record of a hundred, as long as that takes little time.
_BESIDES, _MANY, _SECONDS, _GROUPS = 32, 1024, 2.0, 12
# A group keeps its places. What an item takes from another of its group shows in another grouping:
# both have two items together with probability 0.7 %.
_GROUPINGS = 2
# Items whose place is looked for, and halves that are exchanged for it. Of two places that an item
# is made of, all halves have one in common once in five hundred times.
_FOLLOWED, _HALVES, _STATES = 6, 48, 16
_NO_LIST = "it holds no list of records in which others could be exchanged"
_ELSEWHERE = "some of it comes from where no records could be exchanged, such as files or a cache"
_ANEW = "the same item, loaded twice under the same random numbers, differs"
Places = NDArray[np.int64]


class _List(NamedTuple):
    """Something with an entry for each record, that of item i at `places[i]` as is expected."""

    name: str
    held: Any
    places: Places


class _Item(NamedTuple):
    """An item, and the random numbers it is loaded under."""

    number: int
    seed: int


def check_records_alone(
    data: MapStyle,
    records: Sequence[int],
    draws: random.Random,
    own: Sequence[Own],
    *,
    thorough: bool = False,
) -> str:
    """Compare items with those of data sets that have other records at other places.

    Besides the `records` others are tried, many if `thorough`. `own` are generators besides the
    shared ones. Returns why that could not be done, or nothing.

    Raises:
        InvalidArgumentError: the item of one record changes with another.
    """
    kind = type(data)
    loads_as_lists = kind.__getitem__ in (list.__getitem__, tuple.__getitem__)
    if loads_as_lists and not hasattr(kind, "__getitems__"):
        return ""  # An item is its place.
    lists = _Lists(data, len(data))
    if not (lists.found and lists.is_whole):
        return _NO_LIST
    try:
        return _Check(data, lists.found, draws, own).run(records, thorough=thorough)
    except copy.Error:
        return _NO_LIST


class _Check:
    """The comparisons of one data set whose records are in `lists`."""

    def __init__(
        self, data: MapStyle, lists: list[_List], draws: random.Random, own: Sequence[Own]
    ) -> None:
        self._data, self._lists, self._draws = data, lists, draws
        self._states = RandomStates.now(own)

    def run(self, records: Sequence[int], *, thorough: bool) -> str:
        """Try the `records` and others; returns why that tells nothing, if so."""
        draws, size, until = self._draws, len(self._data), time.perf_counter() + _SECONDS
        others = draws.sample(range(size), min(_MANY if thorough else _BESIDES, size))
        tried = [*dict.fromkeys([*records, *others])]
        first = {*tried[: len({*records}) + _BESIDES]}
        most = -(-size // _GROUPS)
        changed: dict[int, _Item] = {}
        for again in range(_GROUPINGS if thorough else 1):
            draws.shuffle(tried)
            for start in range(0, len(tried), most):
                if again and time.perf_counter() > until:
                    break
                group = tried[start : start + most]
                neighbour = self._with_others_but([each.places[group] for each in self._lists])
                for number in group:
                    item = _Item(number, draws.getrandbits(32))
                    in_time = number in first or time.perf_counter() <= until
                    if not in_time or number in changed:
                        continue
                    if self._changes(item, neighbour, is_needed=number in records):
                        changed[number] = item
        followed = draws.sample([*changed.values()], min(_FOLLOWED, len(changed)))
        repeatable = [item for item in followed if not self._changes(item, self._data)]
        self._follow(repeatable)
        if len(repeatable) < len(followed):
            return _ANEW
        return "" if not thorough or self._is_reached(tried[:_BESIDES]) else _ELSEWHERE

    def _is_reached(self, numbers: Sequence[int]) -> bool:
        """Whether items are alike, but for their number, once one record stands at all places."""
        at, seed = numbers[0], self._draws.getrandbits(32)
        one_place = [np.full(len(each.held), max(each.places[at], 0)) for each in self._lists]
        pairs = zip(self._lists, one_place, strict=True)
        alike = self._with({id(each.held): _in_order(each.held, at) for each, at in pairs})
        first: dict[tuple[bool, ...], tuple[int, list[Any]]] = {}
        for number in numbers:
            try:
                found = leaves(self._loaded(alike, _Item(number, seed)))
            except Exception:  # Entries of several lists need not belong together.
                return False
            # Parts of a data set may have lists of their own.
            lists = tuple(bool(each.places[number] >= 0) for each in self._lists)
            known, expected = first.setdefault(lists, (number, found))
            if len(found) != len(expected) or not all(
                same(one, other) or (type(one) is int and (one, other) == (number, known))
                for one, other in zip(found, expected, strict=True)
            ):
                return False
        return True

    def _follow(self, items: Sequence[_Item]) -> None:
        """Refuse items that are not made of one place of each list, or of another item's."""
        found = [self._places_of(items, each) for each in self._lists]
        for item, *kept in zip(items, *found, strict=True):
            neighbour = self._with_others_but(kept)
            for _ in range(_STATES):
                if self._changes(_Item(item.number, self._draws.getrandbits(32)), neighbour):
                    raise _refusal(item, "when other records than one are exchanged")
            for each, places in zip(self._lists, kept, strict=True):
                other = np.flatnonzero(each.places == places[0]) if places.size == 1 else places[:0]
                if other.size and other[0] != item.number:
                    # The record is another one's too, unless that one lies elsewhere as well.
                    its = _Item(int(other[0]), self._draws.getrandbits(32))
                    one = self._with({id(each.held): self._exchanged(each, places)})
                    if self._changes(its, one) and not self._changes(its, self._data):
                        raise _refusal(item, f"with the record of item {its.number}")

    def _places_of(self, items: Sequence[_Item], each: _List) -> list[Places]:
        """Of each item, the places that all halves of a list have whose exchange changes it."""
        common = np.ones((len(items), len(each.held)), dtype=bool)
        chance = np.random.default_rng(self._draws.getrandbits(32))
        for _ in range(_HALVES if items else 0):
            half = chance.random(len(each.held)) < 0.5
            neighbour = self._with({id(each.held): self._exchanged(each, np.flatnonzero(half))})
            for item, places in zip(items, common, strict=True):
                if self._changes(item, neighbour):
                    places &= half
        return [np.flatnonzero(places) for places in common]

    def _exchanged(self, each: _List, places: Places) -> Any:
        """A list whose entries at these places are others."""
        order = np.arange(len(each.held))
        shift = self._draws.randrange(1, len(order))
        order[places] = (places + shift) % len(order)
        return _in_order(each.held, order)

    def _with_others_but(self, kept: Sequence[Places]) -> Any:
        """The data set with its records in another order, but for some places of each list."""
        new = {}
        for each, places in zip(self._lists, kept, strict=True):
            others = np.ones(len(each.held), dtype=bool)
            others[places[places >= 0]] = False
            new[id(each.held)] = self._exchanged(each, np.flatnonzero(others))
        return self._with(new)

    def _with(self, new: dict[int, Any]) -> Any:
        try:
            return _copied(self._data, dict(new))
        except Exception as error:  # A class does not let itself be copied.
            raise copy.Error from error

    def _changes(self, item: _Item, neighbour: Any, *, is_needed: bool = False) -> bool:
        """Whether an item differs between two data sets, under the same random numbers."""
        try:
            return not same(self._loaded(self._data, item), self._loaded(neighbour, item))
        except Exception:  # Others than those of the batch may be such that cannot be loaded.
            if is_needed:
                raise
            return False

    def _loaded(self, data: Any, item: _Item) -> Any:
        self._states.restore()
        seed_all(item.seed)
        return data[item.number]


class _Lists:
    """Finds what a data set of `size` records holds with one entry for each of them.

    `is_whole` unless something seems to have such entries that nobody can exchange.
    """

    def __init__(self, data: Any, size: int) -> None:
        self.found: list[_List] = []
        self.is_whole = True
        self._met = 0
        self._find(data, "", np.arange(size), size, 0)

    def _find(self, value: Any, name: str, places: Places, size: int, depth: int) -> None:
        if isinstance(value, Subset):
            part: Any = value.dataset
            # What is around a subset may be longer than it.
            there = (places >= 0) & (places < len(value))
            inside = np.full(len(places), -1)
            inside[there] = np.asarray(value.indices)[places[there]]
            self._find(part, name, inside, len(part), depth + 1)
        elif isinstance(value, ConcatDataset):
            first = 0
            for part in value.datasets:
                outside = (places < first) | (places >= first + len(part))
                self._find(part, name, np.where(outside, -1, places - first), len(part), depth + 1)
                first += len(part)
        else:
            met = self._met
            if _is_list(value, size):
                self._note(value, name, places)
            is_plain = met < self._met and not _is_table(value)
            parts = {} if is_plain or depth == _DEPTH else _parts(value)
            for key, part in parts.items():
                self._find(part, key if isinstance(key, str) else name, places, size, depth + 1)
            is_sized = hasattr(type(value), "__len__") and not isinstance(value, str | bytes)
            is_sized &= getattr(value, "ndim", 1) != 0  # A tensor of one number has no length.
            if is_sized and met == self._met and not _is_index(value):
                self.is_whole &= len(value) != size

    def _note(self, value: Any, name: str, places: Places) -> None:
        self._met += 1
        known = next((each for each in self.found if each.held is value), None)
        if known is None:
            self.found.append(_List(name, value, places.copy()))
        else:  # Several parts of a data set may lie in one list.
            np.copyto(known.places, places, where=known.places < 0)


def _is_list(value: Any, size: int) -> bool:
    """Whether this has one entry for each of so many records, and its entries can be exchanged."""
    if size < _FEWEST or not hasattr(type(value), "__len__"):
        return False
    if isinstance(value, Tensor | np.ndarray):
        fits = value.ndim > 0 and value.nbytes <= _MOST_BYTES
    else:
        fits = type(value) in (list, tuple, dict) or hasattr(value, "iloc") or _is_table(value)
    return fits and len(value) == size and not _is_index(value)


def _is_index(value: Any) -> bool:
    """Whether these are whole numbers of which none comes twice: an order, not records."""
    if type(value) in (list, tuple) and value and all(type(item) is int for item in value):
        return len({*value}) == len(value)
    if isinstance(value, Tensor | np.ndarray) and value.ndim == 1:
        array = np.asarray(value.cpu() if isinstance(value, Tensor) else value)
        return array.dtype.kind in "iu" and len(np.unique(array)) == len(array)
    return isinstance(value, range)


def _is_table(value: Any) -> bool:
    """Whether this is a table of the library `datasets`."""
    return hasattr(value, "select") and hasattr(value, "with_transform")


def _in_order(value: Any, order: Places) -> Any:
    """The entries of a list in this order."""
    if _is_table(value):
        return value.select(order.tolist(), keep_in_memory=True)
    if isinstance(value, Tensor | np.ndarray):
        return value[order]
    if hasattr(value, "iloc"):
        frame = value.iloc[order]
        frame.index = value.index
        return frame
    entries = list(value.values() if type(value) is dict else value)
    moved = list(map(entries.__getitem__, order.tolist()))
    return dict(zip(value, moved, strict=True)) if type(value) is dict else type(value)(moved)


def _parts(value: Any) -> Mapping[Any, Any]:
    """What something is made of, by name or number, as far as it can be replaced in a copy."""
    if isinstance(value, FunctionType):
        cells = value.__closure__ or ()
        return {number: cell.cell_contents for number, cell in enumerate(cells)}
    if type(value) in (list, tuple, dict):
        few = value if len(value) <= _MOST_PARTS else type(value)()
        return few if isinstance(few, dict) else dict(enumerate(few))
    if isinstance(value, Tensor | np.ndarray | type):
        return {}
    if _is_table(value):
        return {"_format_kwargs": value._format_kwargs}
    return dict(getattr(value, "__dict__", {}))


def _copied(value: Any, new: dict[int, Any], depth: int = 0) -> Any:
    """The same with other lists, `new` by the identity of the old; what has none is shared."""
    base = new.get(id(value), value)
    if depth > _DEPTH + 2 or (base is not value and not _is_table(value)):
        return base
    parts = _parts(value)
    others = {key: _copied(part, new, depth + 1) for key, part in parts.items()}
    others = {key: part for key, part in others.items() if part is not parts[key]}
    if not others:
        return base
    if isinstance(value, FunctionType):
        cells = tuple(CellType(part) for part in {**parts, **others}.values())
        twin: Any = FunctionType(
            value.__code__, value.__globals__, value.__name__, value.__defaults__, cells
        )
        twin.__kwdefaults__ = value.__kwdefaults__
    elif type(value) in (list, tuple, dict):
        whole = {**parts, **others}
        twin = whole if type(value) is dict else type(value)(whole.values())
    else:
        twin = copy.copy(base)
        vars(twin).update(others)
    new[id(value)] = twin
    return twin


def _refusal(item: _Item, how: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        "data",
        expected="the item of a record to be made of that record alone",
        got=f"an item {item.number} that changes {how}",
        remedy="do not return another record for one that is broken (leave it out of the data "
        "set), draw no second one, and centre by no other: a record would be in several rows of a "
        "batch. What belongs to all items should not have one entry for each record",
    )
