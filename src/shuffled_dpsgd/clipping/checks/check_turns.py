"""Which batches are checked: the first, every new kind, and others by a coin."""

from __future__ import annotations

import random
import time
from collections.abc import Hashable, Iterator
from contextlib import contextmanager

from shuffled_dpsgd.core.referee import DEFAULT_RATE

# Of the time so far, what may have gone into checks when another is made at random. Somewhat more
# goes into what every step is looked at for; together less than one percent of a long run.
SHARE_OF_TIME = 0.004


class TimeShare:
    """What checks have taken; those at random are made while it is a small share of the time."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._began = time.perf_counter()

    def allows(self) -> bool:
        """Whether another check may be made by chance."""
        return self.seconds <= SHARE_OF_TIME * (time.perf_counter() - self._began)

    @contextmanager
    def spent(self) -> Iterator[None]:
        """Count the time inside as time of checks."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - started


class CheckTurns:
    """Decides when a check is made; `time` is what all checks of a run have taken.

    `by_coin` says whether the batch asked for last is the first of all or was chosen at random.
    With `up_to` above zero every batch is checked, in sizes of up to so many rows.
    """

    def __init__(self, rate: float, share: TimeShare | None = None, seed: int | None = 0) -> None:
        self.by_coin = False
        self.up_to = 0
        self.time = share or TimeShare()
        self.draws = random.Random(seed)
        self._rate = rate
        self._seen: set[Hashable] = set()

    def is_due(self, kind: Hashable) -> bool:
        """Whether a batch is of a new kind, or its turn has come at random."""
        by_chance = self.draws.random() < self._rate
        by_chance = by_chance and (self._rate > DEFAULT_RATE or self.time.allows())
        self.by_coin = by_chance or not self._seen
        return by_chance or self.up_to > 0 or self.is_new(kind)

    def is_new(self, kind: Hashable) -> bool:
        """Whether no batch of this kind has been checked."""
        return kind not in self._seen

    def note_checked(self, kind: Hashable) -> None:
        """A batch of this kind has been checked."""
        self._seen.add(kind)
