"""Poisson sampling: every record joins every logical batch independently, with probability q.

Fact established here. The amplification theorem that the accountant uses assumes exactly this
sampler. A shuffled epoch cut into equal batches is a different mechanism with a larger epsilon.

The records that join are found by the gaps between them, so that a draw costs O(batch) and not
O(records). Of independent coins with probability q, the number of failures before the next success
is geometric, P(gap ≥ k) = (1 − q)^k, and gaps are independent. With U uniform in (0, 1),
⌊ln U / ln(1 − q)⌋ has that distribution. U has 53 bits here, so each probability is met to about
1e-16, like any other number of the program.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from shuffled_dpsgd.core.events import check_sampling
from shuffled_dpsgd.core.streams import RandomStreams, uniform_keys, words
from shuffled_dpsgd.errors import require


@dataclass(eq=False, kw_only=True)
class PoissonSampler:
    """Each of `dataset_size` records joins each batch with probability `sampling_prob`.

    Batch sizes vary from zero to `dataset_size`. Of more than `largest_batch` so many are kept, by
    chance. Then a record's presence depends on the others, and ε is larger (`pld`).
    The batches of a block of `bands` steps are one draw of so many times the probability, of which
    each record takes one of the block's places, all equally likely (`banded`).

    >>> sampler = PoissonSampler(dataset_size=8, sampling_prob=0.5, streams=RandomStreams(seed=1))
    >>> sampler.indices(0).tolist() == sampler.indices(0).tolist()
    True
    """

    dataset_size: int
    sampling_prob: float
    streams: RandomStreams
    largest_batch: int | None = None
    bands: int = 1

    def __post_init__(self) -> None:
        require(self.dataset_size >= 1, "dataset_size", "at least 1", self.dataset_size)
        check_sampling(self.sampling_prob * self.bands, num_steps=1)

    def indices(self, step: int) -> torch.Tensor:
        """The records of logical batch `step`, ascending, possibly none.

        The same at every call, until the step is released.
        """
        block, place = divmod(step, self.bands)
        found = self._drawn(self.streams.key("sampling" if self.bands == 1 else "block", block))
        if self.bands > 1:
            places = uniform_keys(self.streams.key("block", block, 1), found.size) % self.bands
            found = found[places == place]
        most = self.largest_batch
        if most is not None and found.size > most:
            key = self.streams.key("cut", step)
            found = np.sort(some_of(found.tolist(), most, key))
        return torch.from_numpy(found)

    def _drawn(self, key: bytes) -> NDArray[np.int64]:
        """The records of one step, or of one block."""
        size, prob = self.dataset_size, self.sampling_prob * self.bands
        if prob == 1.0:
            return np.arange(size)
        # Enough gaps for almost every draw; where they are not, more of the same stream.
        expected = size * prob
        count = math.ceil(expected + 6.0 * math.sqrt(expected) + 10.0)
        found = _places(key, count, prob, size)
        while found.size == count:
            count *= 2
            found = _places(key, count, prob, size)
        return found


def some_of(records: Sequence[int], at_most: int, key: bytes) -> list[int]:
    """At most so many of a unit's own records, every choice of so many being equally likely.

    The mean of their gradients is clipped once. So a unit moves the sum by one clip norm, however
    many records it has: they and fresh random numbers decide which ones, and nobody else's do.

    >>> len(some_of(range(5), 3, bytes(32))), some_of([7], 3, bytes(32))
    (3, [7])
    """
    order = np.argsort(uniform_keys(key, len(records)))
    return [records[place] for place in order[:at_most]]


def _places(key: bytes, count: int, prob: float, size: int) -> NDArray[np.int64]:
    """Where the first `count` successes of a sequence of coins lie, those before `size`."""
    bits = words(key, 0, 2 * count).view("<u8") >> np.uint64(11)
    uniform = (bits.astype(np.float64) + 0.5) * 2.0**-53
    # No gap beyond `size` matters, and without the bound their sum could exceed 64 bits.
    gaps = np.minimum(np.floor(np.log(uniform) / math.log1p(-prob)), float(size))
    places = np.cumsum(gaps.astype(np.int64) + 1) - 1
    return places[places < size]
