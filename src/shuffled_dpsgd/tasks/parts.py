"""Which records of a data set a run uses, and whether they are enough.

A part is drawn at random from a public seed, never cut off: files are often sorted, by class or
by source, and their beginning is not like the rest.
"""

from __future__ import annotations

from collections.abc import Sequence, Sized
from typing import TypeVar

import torch

from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.tasks.config import RunConfig

_SEED = 0
Record = TypeVar("Record")


def drawn_part(size: int, limit: int | None) -> list[int]:
    """At most `limit` of `size` record numbers, drawn without looking at the records, in order.

    >>> len(drawn_part(10, 3)), drawn_part(3, None), drawn_part(3, 8)
    (3, [0, 1, 2], [0, 1, 2])
    """
    if limit is None or limit >= size:
        return list(range(size))
    order = torch.randperm(size, generator=torch.Generator().manual_seed(_SEED))
    return sorted(order[:limit].tolist())


def take_part(records: Sequence[Record], limit: int | None) -> list[Record]:
    """The records `drawn_part` chooses."""
    return [records[index] for index in drawn_part(len(records), limit)]


def check_sizes(config: RunConfig, train: Sized, heldout: Sized) -> None:
    """Refuse less than one expected batch to train on, or nothing to score."""
    batch = config.training.expected_batch_size
    if len(train) < batch:
        raise InvalidArgumentError(
            "training.expected_batch_size",
            expected=f"at most the number of training examples, {len(train)}",
            got=batch,
        )
    if not len(heldout):
        raise InvalidArgumentError(
            "data.path",
            expected="at least one held-out record",
            got=0,
            remedy="a run without a score cannot be judged: hold some records back",
        )
