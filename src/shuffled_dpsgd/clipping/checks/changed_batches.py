"""The inputs of a batch with samples added or left out.

Each takes the inputs and the batch's size, and changes every tensor that has the batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map

# Samples that are enough to see whether samples meet.
_MAX_ROWS = 8


def one_more(inputs: Any, size: int) -> Any:
    """Inputs with the first sample repeated at the end of every tensor that has the batch."""
    return chosen(inputs, size, [*range(size), 0])


def chosen(inputs: Any, size: int, samples: list[int]) -> Any:
    """Inputs with these samples in every tensor that has the batch."""

    def choose(leaf: Any) -> Any:
        has_batch = isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == size
        return leaf[samples] if has_batch else leaf

    return tree_map(choose, inputs)


def first_few(
    args: Any, kwargs: Mapping[str, Any], size: int
) -> tuple[Any, Mapping[str, Any], int]:
    """The call with its first samples only, and how many these are."""
    if size <= _MAX_ROWS:
        return args, kwargs, size
    few = [*range(_MAX_ROWS)]
    return chosen(args, size, few), chosen(dict(kwargs), size, few), _MAX_ROWS
