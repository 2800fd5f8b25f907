"""Which batches the standing check looks at: every new kind of batch, and others by chance."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Hashable

# The share of backwards that are checked at random.
DEFAULT_RATE = 1 / 256
# The share of the time so far that such checks may take, unless a higher rate was asked for.
_SHARE_OF_TIME = 0.01
_SAMPLES = 2


class CheckTurns:
    """Decides which batches are checked, and which of their samples.

    `kind` is the kind of the batch that `is_due` was asked for last. `by_coin` says whether that
    batch is the first of all or was chosen at random. While it is `dense`, every batch is checked.
    """

    def __init__(self, rate: float) -> None:
        self.kind: Hashable = None
        self.by_coin = False
        self.dense = False
        self._rate = rate
        # How often each kind of batch has been checked, and how often it must be at first.
        self._checked: Counter[Hashable] = Counter()
        self._wanted: dict[Hashable, int] = {}
        self._draws = random.Random(0)
        self._began: float | None = None
        self._seconds_by_chance = 0.0

    def is_due(self, size: int, kind: Hashable) -> bool:
        """Whether a batch is of a new kind, or its turn has come at random."""
        self.kind = kind
        by_chance = self._draws.random() < self._rate and self._is_affordable()
        self.by_coin = by_chance or not self._checked
        return size > 0 and (by_chance or self.dense or self.is_new(kind))

    def is_new(self, kind: Hashable) -> bool:
        """Whether a kind of batch has not been checked as often as it must be at first."""
        return self._checked[kind] < self._wanted.get(kind, 1)

    def draw_samples(self, counted: int) -> list[int]:
        """A few of the `counted` first samples of a batch."""
        return sorted(self._draws.sample(range(counted), min(_SAMPLES, counted)))

    def note_checked(self, kind: Hashable, wanted: int) -> None:
        """Count a checked batch of this kind, of which the first `wanted` must be checked."""
        self._checked[kind] += 1
        self._wanted[kind] = wanted

    def note_seconds(self, seconds: float) -> None:
        """Add to the time that checks at random have taken."""
        self._seconds_by_chance += seconds

    def _is_affordable(self) -> bool:
        """Whether checks at random have kept to their share of the time, if they must."""
        if self._rate > DEFAULT_RATE:
            return True
        now = time.perf_counter()
        self._began = now if self._began is None else self._began
        return self._seconds_by_chance <= _SHARE_OF_TIME * (now - self._began)
