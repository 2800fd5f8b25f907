"""How the sums of ranks become one release where each rank owns some rows of every parameter.

The sums of a layer are reduce-scattered as soon as they are formed: each rank adds its rows of the
total to its own and drops the rest. So there is nothing left to reduce when a step is complete, and
nothing to gather afterwards, since a rank updates its own rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from shuffled_dpsgd.core.noise import Place
from shuffled_dpsgd.distributed.parts import Numbering
from shuffled_dpsgd.distributed.world import World
from shuffled_dpsgd.runtime.shards import RowSplit, Span

Tensors = dict[str, Tensor]


class _Layout(NamedTuple):
    """Where the rows of one parameter lie in every rank's piece of a vector."""

    split: RowSplit
    row_size: int
    start: int

    @property
    def width(self) -> int:
        return self.split.per_rank * self.row_size


class ShardedSums:
    """The exchange of ranks that hold some rows of every parameter each."""

    def __init__(self, world: World, parameters: Mapping[str, Tensor]) -> None:
        self._world = world
        self._numbering = Numbering(parameters)

    def places(self) -> Mapping[str, Place]:
        """This rank's rows of every parameter."""
        found = {}
        for name, shape in self._numbering.shapes.items():
            low, _ = self._rows(shape)
            found[name] = self._numbering.place(name, low * shape[1:].numel())
        return found

    def scatter(self, sums: Mapping[str, Tensor]) -> Tensors:
        """Of sums of whole parameters, all of one dtype, this rank's rows of the total."""
        layouts, width = self._layouts(sums)
        vector = next(iter(sums.values())).new_zeros(self._world.size, width)
        for name, layout in layouts.items():
            _fill(vector[:, layout.start : layout.start + layout.width], sums[name], layout)
        piece = self._world.scatter_sum_(vector.view(-1))
        own: Tensors = {}
        for name, layout in layouts.items():
            low, high = layout.split.span(self._world.rank)
            size = (high - low) * layout.row_size
            rows = piece[layout.start : layout.start + size]
            own[name] = rows.view(high - low, *sums[name].shape[1:])
        return own

    def reduce(self, sums: Tensors) -> Tensors:
        """The sums: they are this rank's rows of the total already."""
        return sums

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """The sum of a few numbers over all ranks."""
        return self._world.add_(values.clone())

    def spread(self, shares: Tensors) -> Tensors:
        """The shares: a rank updates its own rows."""
        return shares

    def _rows(self, shape: torch.Size) -> Span:
        return RowSplit(rows=shape[0], ranks=self._world.size).span(self._world.rank)

    def _layouts(self, sums: Mapping[str, Tensor]) -> tuple[dict[str, _Layout], int]:
        layouts, start = {}, 0
        for name, tensor in sums.items():
            split = RowSplit(rows=tensor.shape[0], ranks=self._world.size)
            layouts[name] = _Layout(split, tensor.shape[1:].numel(), start)
            start += layouts[name].width
        return layouts, start


def _fill(pieces: Tensor, whole: Tensor, layout: _Layout) -> None:
    """Write the rows of every rank into its piece; what is left of a piece stays zero."""
    flat = whole.reshape(-1)
    full = flat.numel() // layout.width
    pieces[:full] = flat[: full * layout.width].view(full, layout.width)
    rest = flat[full * layout.width :]
    if rest.numel():
        pieces[full, : rest.numel()] = rest
