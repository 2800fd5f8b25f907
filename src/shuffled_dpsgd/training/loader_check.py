"""The neighbour test of whatever makes a batch: exchange some records, and no other row may change.

A transform that standardises its rows, a collate function that mixes them, a data set that draws a
second record: in each, one record is in several rows, and no clip bounds what it contributes. So
parts of the batches that a run draws are loaded and collated twice, under the same states of all
generators, once with some records exchanged for others. Every other row must be the same, bit for
bit, over the common width.

Where random numbers are drawn, a record may use up more of them than the one it stands for, and
shift those of the rows behind it. Then only rows before it are compared. What could not be compared
at all is in `not_checked`. Where worker processes load, all of it happens in a worker.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, Dataset

from shuffled_dpsgd.clipping.checks.check_turns import CheckTurns
from shuffled_dpsgd.clipping.checks.exchange import MORE_LOOKS
from shuffled_dpsgd.errors import InvalidArgumentError, ShuffledDPError
from shuffled_dpsgd.runtime.random_states import (
    RandomStates,
    generators_in,
    randomness_kept,
    seed_all,
)
from shuffled_dpsgd.training.data import LOADING, PartLoader, as_it_is
from shuffled_dpsgd.training.layout import Part
from shuffled_dpsgd.training.record_check import check_records_alone
from shuffled_dpsgd.training.record_digest import same, same_row, shapes

# Trials of the first part where numbers are drawn at random: twice as many as of a model, because
# they are cheaper, and one row of ten may change only where another label becomes the commonest.
_FIRST_LOOKS = 96
# Trials of a later part where nothing is drawn at random.
_FEW_TRIALS = 2
_FEW_SAMPLES = 4
# Trials of the first part stop after so long, but not before the usual number. So do the exchanges
# in the data set, for all parts together.
_SECONDS = 20.0


class _Stage(NamedTuple):
    """One list made of another: samples of records, or the rows of a batch of samples.

    Entries may be exchanged for any of the `pool`.
    """

    name: str
    make: Callable[[list[Any]], Any]
    items: list[Any]
    pool: list[Any]


class _Tried(NamedTuple):
    """One exchange: whether numbers were drawn, whether rows were compared, and which changed.

    A row is a suspect where a shift of random numbers may explain that it changed.
    """

    is_random: bool = False
    is_compared: bool = False
    suspect: int | None = None


class LoaderCheck(Dataset[Any]):
    """Tries out parts of the batches that a run draws, as `turns` say.

    With `in_worker` it does so in a process like those that load for the run, as a data set whose
    items are what a check has found.
    """

    def __init__(
        self, loader: PartLoader, *, dataset_size: int, turns: CheckTurns, in_worker: bool = False
    ) -> None:
        self.turns = turns
        self._in_worker = in_worker
        self.collate = loader.collate
        self._loader = loader
        self._size = dataset_size
        self._draws = turns.draws
        self._is_first = True
        self._seconds_of_records = 0.0
        self._has_shifted: set[str] = set()
        self._repeats = True
        self._why_no_records = ""
        # Under how many random numbers the first part was compared, where time ran out.
        self._looks = _FIRST_LOOKS
        # Stages and kinds of parts of which no exchange could be compared.
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
                why = "the same records, made twice under the same random numbers, differ"
            found.append(f"not checked: that a row of a batch is made of one record ({why})")
        if self._looks < _FIRST_LOOKS:
            found.append(
                "not checked as often as usual: that a row of a batch is made of one record (under "
                f"{self._looks} random numbers instead of {_FIRST_LOOKS}, as loading takes long)"
            )
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
                if self._in_worker:
                    self._send(part, kind)
                else:
                    self._try_out(part, kind)
            finally:
                states.restore()
        self.turns.note_checked(kind)

    def _send(self, part: Part, kind: Hashable) -> None:
        """Have a worker process try out a part, and take over what it has found."""
        loader: DataLoader[Any] = DataLoader(
            self, batch_size=None, sampler=[(part, kind)], collate_fn=as_it_is, num_workers=1
        )
        for refusal, drawn, found in loader:
            self._draws.setstate(drawn)
            vars(self).update(found)
            if refusal is not None:
                raise refusal

    def __getitem__(self, turn: tuple[Part, Hashable]) -> Any:
        refusal = None
        try:
            self._try_out(*turn)
        except ShuffledDPError as error:
            refusal = error
        kinds = bool, float, int, str, set
        found = {name: value for name, value in vars(self).items() if type(value) in kinds}
        return refusal, self._draws.getstate(), found

    def _try_out(self, part: Part, kind: Hashable) -> None:
        """Try out a part in this process."""
        began = time.perf_counter()
        first, self._is_first = self._is_first, False
        if self._seconds_of_records < _SECONDS:
            why = check_records_alone(
                self._loader.data, part.records, self._draws, self._own, thorough=first
            )
            self._why_no_records = self._why_no_records or why
            self._seconds_of_records += time.perf_counter() - began
        for stage in self._stages(part):
            self._try_all(stage, part, kind, thorough=first)
            rows = len(stage.items)
            if first and 0 < rows < self.turns.up_to:
                # What is done to large batches only: the same records, several times.
                more = stage.items * -(-self.turns.up_to // rows)
                larger = stage._replace(items=more[: self.turns.up_to])
                try:
                    self._made(larger, larger.items, 0, RandomStates.now(self._own))
                except Exception:  # It need not take the same record twice; the card says so.
                    self._unseen.add((stage.name, "larger"))
                    continue
                self._try_all(larger, part, kind, thorough=False)

    def _stages(self, part: Part) -> list[_Stage]:
        """How a part is made, as far as several records come together in it."""
        loader, records = self._loader, list(part.records)
        drawn = self._draws.sample(range(self._size), min(2 * len(records), self._size))
        # Where there are no others, records take each other's places.
        others = [record for record in drawn if record not in records] or records
        samples = pool = self._samples(records)
        if part.length is None:
            # A record that is not in the batch may be too long for it, or one that fails to load.
            with suppress(Exception):
                pool = self._samples(others)
        made = [_Stage("collate", lambda items: loader.collated(items, part), samples, pool)]
        # Without `__getitems__`, records are loaded one by one.
        return [_Stage("data", loader.samples, records, others)] * loader.loads_many + made

    def _samples(self, records: list[int]) -> list[Any]:
        seed_all(self._draws.getrandbits(32))
        return self._loader.samples(records)

    def _try_all(self, stage: _Stage, part: Part, kind: Hashable, *, thorough: bool) -> None:
        """Exchange the records at many places, or at a few."""
        rows = len(stage.items)
        if rows < 2:
            return
        self._unseen.add((stage.name, kind))
        self._repeats = self._repeats and self._is_made_alike(stage)
        if not self._repeats:
            return
        began, suspects = time.perf_counter(), list[int]()
        for done, places in enumerate(self._exchanges(rows), start=1):
            tried = self._try(stage, part, places)
            suspects += [] if tried.suspect is None else [tried.suspect]
            if tried.is_compared:
                self._unseen.discard((stage.name, kind))
            wanted = 2 * (rows - 1).bit_length() if thorough else _FEW_TRIALS
            if tried.is_random:
                slow = time.perf_counter() - began > _SECONDS
                wanted = _FIRST_LOOKS if thorough and not slow else MORE_LOOKS
            if done >= wanted:
                if thorough and tried.is_random:
                    self._looks = min(self._looks, done)
                break
        # Where every record draws as many numbers as any other, none are shifted.
        if suspects and stage.name not in self._has_shifted:
            raise _refusal(stage, part, suspects[0])

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

    def _is_made_alike(self, stage: _Stage) -> bool:
        """Whether the same comes out of the same under the same states."""
        states, seed = RandomStates.now(self._own), self._draws.getrandbits(32)
        one, two = (self._made(stage, stage.items, seed, states)[0] for _ in range(2))
        rows = len(stage.items)
        return all(_is_same(stage, one, two, row, rows) for row in range(rows))

    def _try(self, stage: _Stage, part: Part, places: set[int]) -> _Tried:
        """Exchange what stands at some places."""
        states, seed = RandomStates.now(self._own), self._draws.getrandbits(32)
        size = len(stage.items)
        one, _, end = self._made(stage, stage.items, seed, states)
        times = -(-size // len(stage.pool))
        others = self._draws.sample(stage.pool * times, size)
        items = [others[at] if at in places else item for at, item in enumerate(stage.items)]
        try:
            two, draws, other_end = self._made(stage, items, seed, states)
        except Exception:  # What is told of records that do not belong together is no finding.
            self._has_shifted.add(stage.name)
            return _Tried()
        shifts = draws and (shapes(one) != shapes(two) or end != other_end)
        if shifts:
            self._has_shifted.add(stage.name)
        for row in range(size):
            # What is drawn for several records may be shifted by the first that is exchanged.
            is_behind = draws and row > min(places)
            if row in places or (shifts and (is_behind or stage.name == "collate")):
                continue
            if not _is_same(stage, one, two, row, size):
                if is_behind:
                    return _Tried(is_random=True, is_compared=True, suspect=row)
                raise _refusal(stage, part, row)
        return _Tried(is_random=draws, is_compared=not shifts)

    def _made(
        self, stage: _Stage, items: list[Any], seed: int, states: RandomStates
    ) -> tuple[Any, bool, object]:
        """What is made of these, whether numbers were drawn for it, and where that ended."""
        mine = copy.deepcopy(items)  # They may be changed by what makes it.
        states.restore()
        seed_all(seed)
        start = RandomStates.now(self._own).plain()
        result = stage.make(mine)
        end = RandomStates.now(self._own).plain()
        return result, end != start, end


def _is_same(stage: _Stage, one: Any, two: Any, row: int, size: int) -> bool:
    return same(one[row], two[row]) if stage.name == "data" else same_row(one, two, row, size)


def _refusal(stage: _Stage, part: Part, row: int) -> InvalidArgumentError:
    how = "loaded" if stage.name == "data" else "collated"
    record = part.records[row % len(part.records)]
    return InvalidArgumentError(
        stage.name,
        expected="every row of a batch to be made of one record",
        got=f"row {row} (record {record}) that changes when records beside it are exchanged for "
        f"others, {how} twice under the same random numbers",
        remedy="records must not be mixed, centred or scaled by each other before the model, nor "
        "stand for each other: no clip could bound what one of them contributes",
    )
