"""How the ranks' sums become one release: reduced once, noised once, in the hands of every rank.

Replicated: every rank has the whole model and sums of its own samples. The sums are laid in one
vector per dtype and reduce-scattered, so that each rank holds the total of an equal share of all
coordinates. It clips and noises that share; gathering the shares gives every rank the same bits.
Both together move as much as one all-reduce.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from shuffled_dpsgd.core.noise import Place
from shuffled_dpsgd.distributed.parts import Numbering
from shuffled_dpsgd.distributed.world import World
from shuffled_dpsgd.runtime.shards import Span

Tensors = dict[str, torch.Tensor]


class ReplicatedSums:
    """The exchange of ranks that have the whole model each."""

    def __init__(self, world: World, parameters: Mapping[str, torch.Tensor]) -> None:
        self._world = world
        self._numbering = Numbering(parameters)
        self._vectors: list[torch.Tensor] = []
        # Rounded up, so that every rank has as many.
        self._per_rank = [-(-total // world.size) for total in self._numbering.totals]

    def places(self) -> Mapping[str, Place]:
        """This rank's run of the coordinates of every dtype."""
        return {
            name: self._numbering.place(name, self._span(group, name).low)
            for group in range(len(self._numbering.totals))
            for name in self._numbering.names(group)
        }

    def reduce(self, sums: Tensors) -> Tensors:
        """This rank's share of the total over all ranks, a part of every tensor."""
        self._vectors = [self._laid_out(group, sums) for group in range(len(self._per_rank))]
        shares: Tensors = {}
        for group, vector in enumerate(self._vectors):
            self._world.scatter_sum_(vector)
            shares |= self._cut(group, vector)
        return {name: shares[name] for name in sums}

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """The sum of a few numbers over all ranks."""
        return self._world.add_(values.clone())

    def spread(self, shares: Tensors) -> Tensors:
        """Whole private gradients from every rank's share, which `reduce` has laid out."""
        whole: Tensors = {}
        for group, vector in enumerate(self._vectors):
            self._world.gather_pieces_(vector)
            first = 0
            for name in self._numbering.names(group):
                shape = self._numbering.shapes[name]
                whole[name] = vector[first : first + shape.numel()].view(shape)
                first += shape.numel()
        self._vectors = []
        return {name: whole[name] for name in shares}

    def _laid_out(self, group: int, sums: Tensors) -> torch.Tensor:
        """All sums of one dtype in one vector, filled up to a multiple of the ranks."""
        named = [sums[name] for name in self._numbering.names(group)]
        size = self._per_rank[group] * self._world.size
        vector = torch.empty(size, dtype=self._numbering.dtypes[group], device=named[0].device)
        total = self._numbering.totals[group]
        vector[total:] = 0.0
        torch.cat([tensor.reshape(-1) for tensor in named], out=vector[:total])
        return vector

    def _cut(self, group: int, vector: torch.Tensor) -> Tensors:
        """The parts of this rank's piece of the vector, by parameter; some are empty."""
        parts = {}
        for name in self._numbering.names(group):
            low, high = self._span(group, name)
            first = self._numbering.place(name, low).first
            parts[name] = vector[first : first + high - low]
        return parts

    def _span(self, group: int, name: str) -> Span:
        per_rank = self._per_rank[group]
        start = self._world.rank * per_rank
        return self._numbering.span(name, start, start + per_rank)
