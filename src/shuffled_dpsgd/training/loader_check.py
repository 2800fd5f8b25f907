"""The neighbour test of whatever makes a batch: exchange some records, and no other row may change.

A transform that standardises its rows, a collate function that mixes them, a data set that draws a
second record: in each, one record is in several rows, and no clip bounds what it contributes. So
parts of the batches that a run draws are loaded and collated twice, under the same states of all
generators, once with some records exchanged for others. Every other row must be the same, bit for
bit, over the common width.

Where random numbers are drawn, a record may use up more of them than the one it stands for, and
shift those of the rows behind it. Then only rows before it are compared. What cannot be repeated at
all cannot be compared: `why_not` says so.
"""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from shuffled_dpsgd.clipping.checks.check_turns import CheckTurns
from shuffled_dpsgd.clipping.checks.random_states import RandomStates, generators_in, seed_all
from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.training import equal_rows
from shuffled_dpsgd.training.data import LOADING, PartLoader
from shuffled_dpsgd.training.equal_rows import same, same_row
from shuffled_dpsgd.training.global_randomness import randomness_kept
from shuffled_dpsgd.training.layout import Part
from shuffled_dpsgd.training.record_check import check_records_alone

# Where random numbers are drawn: at the first part, and at later ones. Of what happens in one
# batch of ten, 48 trials miss 0.6 %.
_FIRST_TRIALS, _MORE_TRIALS = 48, 8
# Where none are drawn, of later parts.
_FEW_TRIALS = 2
# Trials of the first part stop after so long, but not before the second number above. So do the
# exchanges in the data set, for all parts together.
_SECONDS = 20.0
_HOST = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class _Outcome:
    """What one exchange showed: `row` changed, unless a shift of random numbers explains it."""

    is_random: bool
    shifts: bool
    row: int | None


class LoaderCheck:
    """Tries out parts of the batches that a run draws; `rate` of them at random.

    While it is `dense`, every part is tried.
    """

    def __init__(self, loader: PartLoader, *, dataset_size: int, rate: float) -> None:
        self.turns = CheckTurns(rate)
        self.why_not: str | None = None
        self._loader = loader
        self._size = dataset_size
        self._draws = random.Random(1)
        self._is_first = True
        self._seconds_of_records = 0.0
        self._loads_at_random = self._draws_numbers = self._has_shifted = False
        self._own = generators_in([loader.data, loader.collate], 4)

    def check(self, part: Part) -> None:
        """Try out a part, if its turn has come.

        Raises:
            InvalidArgumentError: a row depends on a record of another.
        """
        rows = len(part.records)
        kind = rows.bit_length() if rows > 1 else 1, part.length
        if not self.turns.is_due(rows, kind):
            return
        started = time.perf_counter()
        is_new = self.turns.is_new(kind)
        with LOADING, randomness_kept():
            states = RandomStates.with_own(self._own, _HOST)
            try:
                self._check(part)
            finally:
                states.restore()
        self.turns.note_checked(kind, 1)
        if not is_new:
            self.turns.note_seconds(time.perf_counter() - started)

    def _check(self, part: Part) -> None:
        seed, started = self._draws.getrandbits(32), time.perf_counter()
        if self._seconds_of_records < _SECONDS:
            check_records_alone(self._loader, part.records, seed, self._draws)
            self._seconds_of_records += time.perf_counter() - started
        first, self._is_first = self._is_first, False
        if len(part.records) < 2 or not self._repeats(part, seed):
            return
        began, suspects = time.perf_counter(), list[_Outcome]()
        for done, places in enumerate(self._exchanges(len(part.records)), start=1):
            outcome = self._try(part, places, self._draws.getrandbits(32))
            suspects.append(outcome)
            slow = time.perf_counter() - began > _SECONDS
            if outcome.is_random:
                if done >= (_FIRST_TRIALS if first and not slow else _MORE_TRIALS):
                    break
            elif done >= (2 * (len(part.records) - 1).bit_length() if first else _FEW_TRIALS):
                break
        # Where every record draws as many numbers as any other, none are shifted.
        self._has_shifted = self._has_shifted or any(each.shifts for each in suspects)
        if not self._has_shifted:
            for each in suspects:
                if each.row is not None:
                    raise _refusal("collate", part, each.row)

    def _exchanges(self, rows: int) -> Iterator[set[int]]:
        """Which rows to exchange: first so that any two are told apart, then by chance."""
        bits = list(range((rows - 1).bit_length()))
        self._draws.shuffle(bits)
        for bit in bits:
            members = {row for row in range(rows) if (row >> bit) % 2}
            yield members
            yield set(range(rows)) - members
        while True:
            first = self._draws.randrange(1, rows)
            yield set(range(first, rows))
            some = self._draws.sample(range(rows), self._draws.randrange(1, rows))
            yield set(some)

    def _repeats(self, part: Part, seed: int) -> bool:
        """Whether the same part comes out the same under the same states."""
        states = RandomStates.with_own(self._own, _HOST)
        runs = []
        for _ in range(2):
            states.restore()
            samples = self._samples(part.records, seed)
            runs.append(self._collated(samples, part, seed)[0])
        rows = range(len(part.records))
        if all(same_row(runs[0], runs[1], row, len(rows)) for row in rows):
            return True
        self.why_not = "loading the same records twice, under the same random numbers, differs"
        return False

    def _try(self, part: Part, places: set[int], seed: int) -> _Outcome:
        """Exchange the records at some places, all at once."""
        states = RandomStates.with_own(self._own, _HOST)
        size = len(part.records)
        one = self._samples(part.records, seed)
        two = self._exchanged(part, places, one, seed, states)
        # What is drawn for several records at once may be shifted by the first that is exchanged.
        shifted = min(places) if self._loads_at_random else size
        for row in range(size):
            if row not in places and row < shifted and not same(one[row], two[row]):
                raise _refusal("data", part, row)
        runs = []
        for samples in (one, two):
            states.restore()
            try:
                runs.append(self._collated(samples, part, seed))
            except Exception:
                if samples is one:
                    raise
                return _Outcome(is_random=False, shifts=True, row=None)
        is_random = self._loads_at_random or self._draws_numbers
        shapes = [equal_rows.shapes(batch) for batch, _ in runs]
        shifts = shapes[0] != shapes[1] or runs[0][1] != runs[1][1]
        for row in sorted(set(range(size)) - places):
            if same_row(runs[0][0], runs[1][0], row, size) or (is_random and shifts):
                continue
            if not is_random or row < min(places):
                raise _refusal("collate", part, row)
            return _Outcome(is_random=True, shifts=False, row=row)
        return _Outcome(is_random=is_random, shifts=shifts, row=None)

    def _exchanged(
        self, part: Part, places: set[int], one: list[Any], seed: int, states: RandomStates
    ) -> list[Any]:
        """Samples of other records at some places; of the same batch where others may not fit."""
        size = len(one)
        if part.length is None:
            records = [self._other(r) if at in places else r for at, r in enumerate(part.records)]
            states.restore()
            try:
                return self._samples(records, seed)
            except Exception:
                # A record that is not in the batch may be one that cannot be loaded.
                states.restore()
        own = [self._draws.choice([r for r in range(size) if r != at]) for at in range(size)]
        return [one[own[at]] if at in places else each for at, each in enumerate(one)]

    def _other(self, record: int) -> int:
        other = self._draws.randrange(self._size - 1) if self._size > 1 else 0
        return other + (other >= record)

    def _samples(self, records: Any, seed: int) -> list[Any]:
        """The records as the data set gives them, each under numbers of its own if it can be."""
        self._loads_at_random = False
        if self._loader.loads_many:
            seed_all(seed)
            start = self._state()
            found = self._loader.samples(list(records))
            self._loads_at_random = self._state() != start
            return found
        found = []
        for place, record in enumerate(records):
            seed_all((seed + 7919 * place) % 2**32)
            found += self._loader.samples([record])
        return found

    def _collated(self, samples: list[Any], part: Part, seed: int) -> tuple[Any, bytes]:
        """A batch, and where it left the generators; samples may be changed by what collates."""
        mine = copy.deepcopy(samples)
        seed_all(seed)
        start = self._state()
        batch = self._loader.collated(mine, part)
        end = self._state()
        self._draws_numbers = end != start
        return batch, end

    def _state(self) -> bytes:
        return RandomStates.with_own(self._own, _HOST).digest()


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
