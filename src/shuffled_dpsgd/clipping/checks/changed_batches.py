"""The inputs of a batch with samples added, left out, replaced or in another order.

Each takes the inputs and the batch's size, and changes every tensor that has the batch.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map


def one_more(inputs: Any, size: int) -> Any:
    """Inputs with the first sample repeated at the end of every tensor that has the batch."""
    return chosen(inputs, size, [*range(size), 0])


def first_two(inputs: Any, size: int) -> Any:
    return chosen(inputs, size, [0, 1])


def first_half(inputs: Any, size: int) -> Any:
    return chosen(inputs, size, [*range(size // 2)])


def second_half(inputs: Any, size: int) -> Any:
    return chosen(inputs, size, [*range(size // 2, size)])


def chosen(inputs: Any, size: int, samples: list[int]) -> Any:
    """Inputs with these samples in every tensor that has the batch."""

    def choose(leaf: Any) -> Any:
        has_batch = isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == size
        return leaf[samples] if has_batch else leaf

    return tree_map(choose, inputs)


def as_it_is(inputs: Any, size: int) -> Any:
    return inputs


def back_to_front(inputs: Any, size: int) -> Any:
    """Inputs with the samples in reverse order."""
    return chosen(inputs, size, [*reversed(range(size))])
