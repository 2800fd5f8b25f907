"""Poisson sampling: every record joins every logical batch independently.

The amplification theorems the accountants use assume exactly this sampler. A shuffled epoch cut
into equal batches is a different mechanism with a different, larger epsilon.
"""

from __future__ import annotations

from typing import Protocol

import torch

from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.training.randomness import RandomStreams


class Sampler(Protocol):
    """Which records take part in a step."""

    @property
    def dataset_size(self) -> int: ...

    def indices(self, step: int) -> torch.Tensor:
        """The records of logical batch `step`, as a one-dimensional int64 tensor."""
        ...


class PoissonSampler:
    """Each of `dataset_size` records joins each batch with probability `sampling_prob`.

    Batch sizes vary from zero to `dataset_size`; nothing is dropped, padded or topped up, because
    any of those would make one record's presence depend on the others.

    >>> sampler = PoissonSampler(dataset_size=8, sampling_prob=0.5, streams=RandomStreams(seed=1))
    >>> sampler.indices(0).tolist() == sampler.indices(0).tolist()
    True
    """

    def __init__(self, *, dataset_size: int, sampling_prob: float, streams: RandomStreams) -> None:
        if dataset_size < 1:
            raise InvalidArgumentError(
                "dataset_size", expected="a positive integer", got=dataset_size
            )
        if not 0.0 < sampling_prob <= 1.0:
            raise InvalidArgumentError(
                "sampling_prob",
                expected="a probability in (0, 1]",
                got=sampling_prob,
                remedy="expected_batch_size must not exceed dataset_size",
            )
        self._dataset_size = dataset_size
        self._sampling_prob = sampling_prob
        self._streams = streams

    @property
    def dataset_size(self) -> int:
        """Number of records the sampler draws from."""
        return self._dataset_size

    @property
    def sampling_prob(self) -> float:
        """Probability of one record joining one batch."""
        return self._sampling_prob

    def indices(self, step: int) -> torch.Tensor:
        """The records of logical batch `step`, ascending, possibly none.

        In a seeded run a function of the step alone; in a secure run every call draws anew.
        """
        uniform = self._streams.numpy("sampling", step).random(self._dataset_size)
        return torch.from_numpy((uniform < self._sampling_prob).nonzero()[0])
