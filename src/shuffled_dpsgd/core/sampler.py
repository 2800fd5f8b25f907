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

import numpy as np
import torch
from numpy.typing import NDArray

from shuffled_dpsgd.core.events import check_sampling
from shuffled_dpsgd.core.streams import RandomStreams, uniform_keys, words
from shuffled_dpsgd.errors import require


class PoissonSampler:
    """Each of `dataset_size` records joins each batch with probability `sampling_prob`.

    Batch sizes vary from zero to `dataset_size`. Of more than `largest_batch` so many are kept,
    each choice of them equally likely. Then one record's presence depends on the others, and ε is
    larger (`pld`). Nothing else is dropped, padded or topped up.

    >>> sampler = PoissonSampler(dataset_size=8, sampling_prob=0.5, streams=RandomStreams(seed=1))
    >>> sampler.indices(0).tolist() == sampler.indices(0).tolist()
    True
    """

    def __init__(
        self,
        *,
        dataset_size: int,
        sampling_prob: float,
        streams: RandomStreams,
        largest_batch: int | None = None,
    ) -> None:
        require(dataset_size >= 1, "dataset_size", "at least 1", dataset_size)
        check_sampling(sampling_prob, num_steps=1)
        self.dataset_size = dataset_size
        self.sampling_prob = sampling_prob
        self._streams = streams
        self.largest_batch = largest_batch

    def indices(self, step: int) -> torch.Tensor:
        """The records of logical batch `step`, ascending, possibly none.

        The same at every call, until the step is released.
        """
        size, prob = self.dataset_size, self.sampling_prob
        if prob == 1.0:
            return torch.arange(size)
        key = self._streams.key("sampling", step)
        # Enough gaps for almost every draw; where they are not, more of the same stream.
        expected = size * prob
        count = math.ceil(expected + 6.0 * math.sqrt(expected) + 10.0)
        found = _places(key, count, prob, size)
        while found.size == count:
            count *= 2
            found = _places(key, count, prob, size)
        most = self.largest_batch
        if most is not None and found.size > most:
            key = self._streams.key("sampling", step, attempt=1)
            found = np.sort(some_of(found.tolist(), most, key))
        return torch.from_numpy(found)


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
