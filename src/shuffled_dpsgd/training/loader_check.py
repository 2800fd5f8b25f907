"""The neighbour test of whatever makes a batch: exchange some records, and no other row may change.

A transform that standardises its rows, a collate function that mixes them, a data set that draws a
second record: in each, one record is in several rows, and no clip bounds what it contributes. So
parts of the batches that a run draws are loaded and collated twice, under the same states of all
generators, once with some records exchanged for others. Every other row must be the same, bit for
bit, over the common width.

Where random numbers are drawn, a record may use up more of them than the one it stands for, and
shift those of the rows behind it. Then only rows before it are compared. What could not be compared
at all is in `not_checked`.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shuffled_dpsgd.clipping.checks.check_turns import CheckTurns
from shuffled_dpsgd.clipping.checks.exchange import FIRST_LOOKS, MORE_LOOKS
from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.runtime.random_states import (
    RandomStates,
    generators_in,
    randomness_kept,
    seed_all,
)
from shuffled_dpsgd.training.data import LOADING, PartLoader
from shuffled_dpsgd.training.layout import Part
from shuffled_dpsgd.training.record_check import check_records_alone
from shuffled_dpsgd.training.record_digest import same, same_row, shapes

# Trials of a later part where nothing is drawn at random.
_FEW_TRIALS = 2
_FEW_SAMPLES = 4
# Trials of the first part stop after so long, but not before the usual number. So do the exchanges
# in the data set, for all parts together.
_SECONDS = 20.0


@dataclass(frozen=True, kw_only=True)
class _Loaded:
    """A part as it was loaded and collated; what was drawn by whom, and where that ended."""

    samples: list[Any]
    batch: Any
    loads_at_random: bool
    draws: bool
    end: str


@dataclass(frozen=True, kw_only=True)
class _Tried:
    """One exchange: whether numbers were drawn, whether rows were compared, and which changed.

    A row is a suspect where a shift of random numbers may explain that it changed.
    """

    is_random: bool = False
    is_compared: bool = False
    suspect: int | None = None


class LoaderCheck:
    """Tries out parts of the batches that a run draws, as `turns` say."""

    def __init__(self, loader: PartLoader, *, dataset_size: int, turns: CheckTurns) -> None:
        self.turns = turns
        self.collate = loader.collate
        self._loader = loader
        self._size = dataset_size
        self._draws = turns.draws
        self._is_first = True
        self._seconds_of_records = 0.0
        self._has_shifted = False
        self._repeats = True
        self._why_no_records = ""
        # Kinds of parts of which no exchange could be compared.
        self._unseen: set[Hashable] = set()
        self._own = generators_in([loader.data, loader.collate], 4)

    @property
    def not_checked(self) -> list[str]:
        """What the card lists because it could not be tried."""
        found = []
        if self._why_no_records:
            found.append(
                "not checked: that an item of the data set is made of one record "
                f"({self._why_no_records})"
            )
        if self._unseen:
            why = "no exchange of records could be compared"
            if not self._repeats:
                why = "loading the same records twice, under the same random numbers, differs"
            found.append(f"not checked: that a row of a batch is made of one record ({why})")
        return found

    def some_samples(self, part: Part) -> list[Any]:
        """A few of the part's records, loaded once more."""
        records = self._draws.sample(part.records, min(_FEW_SAMPLES, len(part.records)))
        with LOADING, randomness_kept():
            return self._loader.samples(records)

    def check(self, part: Part) -> None:
        """Try out a part, if its turn has come.

        Raises:
            InvalidArgumentError: a row depends on a record of another.
        """
        kind = len(part.records).bit_length(), part.length
        if not self.turns.is_due(kind):
            return
        with LOADING, self.turns.time.spent():
            states = RandomStates.now(self._own)
            try:
                self._check(part, kind)
            finally:
                states.restore()
        self.turns.note_checked(kind)

    def _check(self, part: Part, kind: Hashable) -> None:
        began = time.perf_counter()
        first, self._is_first = self._is_first, False
        if not self._why_no_records and self._seconds_of_records < _SECONDS:
            self._why_no_records = check_records_alone(
                self._loader.data, part.records, self._draws, self._own, thorough=first
            )
            self._seconds_of_records += time.perf_counter() - began
        self._try_all(part, kind, thorough=first)
        rows = len(part.records)
        if first and 0 < rows < self.turns.up_to:
            # What is done to large batches only: the same records, several times.
            times = -(-self.turns.up_to // rows)
            larger = replace(part, records=(part.records * times)[: self.turns.up_to])
            try:
                self._load(larger.records, larger, 0, RandomStates.now(self._own))
            except Exception:  # What collates need not take the same record twice.
                return
            self._try_all(larger, kind, thorough=False)

    def _try_all(self, part: Part, kind: Hashable, *, thorough: bool) -> None:
        """Exchange the records at many places, or at a few."""
        rows = len(part.records)
        if rows < 2:
            return
        self._unseen.add(kind)
        self._repeats = self._repeats and self._loads_alike(part)
        if not self._repeats:
            return
        began, suspects = time.perf_counter(), list[int]()
        for done, places in enumerate(self._exchanges(rows), start=1):
            tried = self._try(part, places)
            suspects += [] if tried.suspect is None else [tried.suspect]
            if tried.is_compared:
                self._unseen.discard(kind)
            wanted = 2 * (rows - 1).bit_length() if thorough else _FEW_TRIALS
            if tried.is_random:
                slow = time.perf_counter() - began > _SECONDS
                wanted = FIRST_LOOKS if thorough and not slow else MORE_LOOKS
            if done >= wanted:
                break
        # Where every record draws as many numbers as any other, none are shifted.
        if suspects and not self._has_shifted:
            raise _refusal("collate", part, suspects[0])

    def _exchanges(self, rows: int) -> Iterator[set[int]]:
        """Which rows to exchange: first so that any two are told apart, then by chance."""
        bits = list(range((rows - 1).bit_length()))
        self._draws.shuffle(bits)
        for bit in bits:
            members = {row for row in range(rows) if (row >> bit) % 2}
            yield members
            yield set(range(rows)) - members
        while True:
            yield set(range(self._draws.randrange(1, rows), rows))
            yield set(self._draws.sample(range(rows), self._draws.randrange(1, rows)))

    def _loads_alike(self, part: Part) -> bool:
        """Whether the same part comes out the same under the same states."""
        states, seed = RandomStates.now(self._own), self._draws.getrandbits(32)
        one, two = (self._load(part.records, part, seed, states).batch for _ in range(2))
        rows = len(part.records)
        return all(same_row(one, two, row, rows) for row in range(rows))

    def _try(self, part: Part, places: set[int]) -> _Tried:
        """Exchange the records at some places."""
        states, seed = RandomStates.now(self._own), self._draws.getrandbits(32)
        size = len(part.records)
        one = self._load(part.records, part, seed, states)
        try:
            two = self._exchanged(part, places, one, seed, states)
        except Exception:  # What is told of records that do not belong together is no finding.
            self._has_shifted = True
            return _Tried()
        rest = [row for row in range(size) if row not in places]
        # What is drawn for several records at once may be shifted by the first that is exchanged.
        shifted = min(places) if two.loads_at_random else size
        for row in rest:
            if row < shifted and not same(one.samples[row], two.samples[row]):
                raise _refusal("data", part, row)
        is_random = two.loads_at_random or two.draws
        shifts = is_random and (shapes(one.batch) != shapes(two.batch) or one.end != two.end)
        self._has_shifted = self._has_shifted or shifts
        for row in rest if not shifts else []:
            if not same_row(one.batch, two.batch, row, size):
                if is_random and row > min(places):
                    return _Tried(is_random=True, is_compared=True, suspect=row)
                raise _refusal("collate", part, row)
        return _Tried(is_random=is_random, is_compared=not shifts)

    def _exchanged(
        self, part: Part, places: set[int], one: _Loaded, seed: int, states: RandomStates
    ) -> _Loaded:
        """The part with other records at some places; of its own where others may not fit."""
        if part.length is None:
            records = [self._other(r) if at in places else r for at, r in enumerate(part.records)]
            try:
                return self._load(records, part, seed, states)
            except Exception:  # A record that is not in the batch may be one that cannot be loaded.
                pass
        size = len(one.samples)
        own = [self._draws.choice([r for r in range(size) if r != at]) for at in range(size)]
        samples = [one.samples[own[at]] if at in places else s for at, s in enumerate(one.samples)]
        states.restore()
        return self._collated(samples, part, seed, loads_at_random=one.loads_at_random)

    def _other(self, record: int) -> int:
        other = self._draws.randrange(self._size - 1) if self._size > 1 else 0
        return other + (other >= record)

    def _load(self, records: Sequence[int], part: Part, seed: int, states: RandomStates) -> _Loaded:
        """The records as the data set gives them, each under its own random numbers if possible."""
        states.restore()
        seed_all(seed)
        start = self._digest()
        if self._loader.loads_many:
            samples = self._loader.samples(list(records))
        else:
            samples = []
            for place, record in enumerate(records):
                seed_all((seed + 7919 * place) % 2**32)
                samples += self._loader.samples([record])
            seed_all(seed)
        at_random = self._loader.loads_many and self._digest() != start
        return self._collated(samples, part, seed, loads_at_random=at_random)

    def _collated(
        self, samples: list[Any], part: Part, seed: int, *, loads_at_random: bool
    ) -> _Loaded:
        """Samples as a batch; they may be changed by what collates."""
        mine = copy.deepcopy(samples)
        seed_all(seed)
        start = self._digest()
        batch = self._loader.collated(mine, part)
        end = self._digest()
        return _Loaded(
            samples=samples,
            batch=batch,
            loads_at_random=loads_at_random,
            draws=end != start,
            end=end,
        )

    def _digest(self) -> str:
        return RandomStates.now(self._own).digest()


def _refusal(name: str, part: Part, row: int) -> InvalidArgumentError:
    how = "loaded" if name == "data" else "loaded and collated"
    return InvalidArgumentError(
        name,
        expected="every row of a batch to be made of one record",
        got=f"row {row} (record {part.records[row]}) that changes when records beside it are "
        f"exchanged for others, {how} twice under the same random numbers",
        remedy="records must not be mixed, centred or scaled by each other before the model, nor "
        "stand for each other: no clip could bound what one of them contributes",
    )
