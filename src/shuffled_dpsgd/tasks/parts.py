"""Which records of a data set a run uses, and whether they are enough.

A part is drawn at random from a public seed, never cut off: files are often sorted, by class or
by source, and their beginning is not like the rest.
"""

from __future__ import annotations

from typing import Any

import torch

from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.tasks.config import RunConfig
from shuffled_dpsgd.tasks.data.records import Splits

_SEED = 0
_HOLDING_SEED = 1


def drawn_part(size: int, limit: int | None) -> list[int]:
    """At most `limit` of `size` record numbers, drawn without looking at the records, in order.

    >>> len(drawn_part(10, 3)), drawn_part(3, None), drawn_part(3, 8)
    (3, [0, 1, 2], [0, 1, 2])
    """
    if limit is None or limit >= size:
        return list(range(size))
    order = torch.randperm(size, generator=torch.Generator().manual_seed(_SEED))
    return sorted(order[:limit].tolist())


def held_back(size: int, count: int) -> tuple[list[int], list[int]]:
    """The record numbers to train on and `count` others, drawn without looking at the records.

    >>> kept, back = held_back(10, 3)
    >>> len(kept), len(back), sorted(kept + back) == list(range(10))
    (7, 3, True)

    Raises:
        InvalidArgumentError: there are not more records than that.
    """
    if count >= size:
        raise InvalidArgumentError(
            "data.heldout_from_train", expected=f"fewer than {size} records", got=count
        )
    order = torch.randperm(size, generator=torch.Generator().manual_seed(_HOLDING_SEED))
    return sorted(order[count:].tolist()), sorted(order[:count].tolist())


def check_sizes(config: RunConfig, splits: Splits[Any]) -> None:
    """Refuse less than one expected batch to train on, or nothing to score."""
    batch = config.training.expected_batch_size
    if len(splits.train) < batch:
        raise InvalidArgumentError(
            "training.expected_batch_size",
            expected=f"at most the number of training examples, {len(splits.train)}",
            got=batch,
        )
    for name, heldout in splits.heldout.items():
        if not len(heldout):
            raise InvalidArgumentError(
                "data.path",
                expected=f"at least one held-out record in {name}",
                got=0,
                remedy="a run without a score cannot be judged: hold some records back",
            )
