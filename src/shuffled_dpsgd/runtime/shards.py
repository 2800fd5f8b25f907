"""Parameters whose rows are spread over the ranks of a launch, as `fully_shard` leaves them.

Such a parameter is a DTensor. It has the shape of the whole and holds the rows of one rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from torch import Tensor


class Span(NamedTuple):
    """A run of rows, or of coordinates: from `low` up to, not including, `high`."""

    low: int
    high: int


@dataclass(frozen=True, kw_only=True)
class RowSplit:
    """How `rows` are dealt out to `ranks`, as `torch.chunk` does: the last ranks may have none.

    >>> [tuple(RowSplit(rows=5, ranks=4).span(rank)) for rank in range(4)]
    [(0, 2), (2, 4), (4, 5), (5, 5)]
    """

    rows: int
    ranks: int

    @property
    def per_rank(self) -> int:
        """Rows of every rank but the last ones; at least 1, so that it can be divided by."""
        return max(1, -(-self.rows // self.ranks))

    def span(self, rank: int) -> Span:
        """The rows of one rank."""
        low = min(rank * self.per_rank, self.rows)
        return Span(low, min(low + self.per_rank, self.rows))


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is spread over several processes. By name: importing DTensor takes long."""
    return type(tensor).__name__ == "DTensor"


def any_sharded(tensors: Iterable[Tensor]) -> bool:
    """Whether one of the tensors is spread over several processes."""
    return any(map(is_sharded, tensors))


def held(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor, sharing its memory: itself, unless it is spread."""
    if not is_sharded(tensor):
        return tensor
    return cast(Tensor, cast(Any, tensor)._local_tensor)


def mesh_of(tensor: Tensor) -> Any:
    """The ranks a tensor is spread over."""
    return cast(Any, tensor).device_mesh
