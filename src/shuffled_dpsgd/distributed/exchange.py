"""How the ranks' sums become one release: added up once, noised once, in the hands of every rank.

Replicated ranks have the whole model each, sharded ranks some rows of every parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from shuffled_dpsgd.core.clip import sum_dtype
from shuffled_dpsgd.core.noise import Place
from shuffled_dpsgd.distributed.layouts import Numbering, RowPieces
from shuffled_dpsgd.distributed.world import World
from shuffled_dpsgd.runtime.shards import RowSplit, Sharding, Span, held

Tensors = dict[str, Tensor]


class ReplicatedSums:
    """The exchange of ranks that have the whole model each, and sums of their own samples.

    The sums are laid in one vector per dtype and reduce-scattered, so that each rank holds the
    total of an equal share of all coordinates. It clips and noises that share; gathering the shares
    gives every rank the same bits. Both together move as much as one all-reduce.
    """

    def __init__(self, world: World, parameters: Mapping[str, Tensor]) -> None:
        self._world = world
        self._numbering = Numbering(parameters)
        self._vectors: list[Tensor] = []
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
            for name in self._numbering.names(group):
                low, high = self._span(group, name)
                first = self._numbering.place(name, low).first
                shares[name] = vector[first : first + high - low]
        return {name: shares[name] for name in sums}

    def total(self, values: Tensor) -> Tensor:
        """The sum of a few numbers over all ranks."""
        return self._world.add_(values.clone())

    def spread(self, shares: Tensors) -> Tensors:
        """Whole private gradients from every rank's share, which `reduce` has laid out."""
        whole: Tensors = {}
        for group, vector in enumerate(self._vectors):
            self._world.gather_pieces_(vector)
            for name in self._numbering.names(group):
                shape, first = self._numbering.shapes[name], self._numbering.place(name).first
                whole[name] = vector[first : first + shape.numel()].view(shape)
        self._vectors = []
        return {name: whole[name] for name in shares}

    def _laid_out(self, group: int, sums: Tensors) -> Tensor:
        """All sums of one dtype in one vector, filled up to a multiple of the ranks."""
        named = [sums[name] for name in self._numbering.names(group)]
        size = self._per_rank[group] * self._world.size
        vector = torch.empty(size, dtype=self._numbering.dtypes[group], device=named[0].device)
        total = self._numbering.totals[group]
        vector[total:] = 0.0
        torch.cat([tensor.reshape(-1) for tensor in named], out=vector[:total])
        return vector

    def _span(self, group: int, name: str) -> Span:
        per_rank = self._per_rank[group]
        start = self._world.rank * per_rank
        return self._numbering.span(name, start, start + per_rank)


class ShardedSums:
    """The exchange of ranks that hold some rows of every parameter each.

    The sums of a layer are reduce-scattered as soon as they are formed: each rank adds its rows of
    the total to its own and drops the rest. So there is nothing left to reduce when a step is
    complete, and nothing to gather afterwards, since a rank updates its own rows.
    """

    def __init__(self, world: World, parameters: Mapping[str, Tensor]) -> None:
        self._world = world
        self._numbering = Numbering(parameters)

    def places(self) -> Mapping[str, Place]:
        """This rank's rows of every parameter."""
        found = {}
        for name, shape in self._numbering.shapes.items():
            low, _ = RowSplit(rows=shape[0], ranks=self._world.size).span(self._world.rank)
            found[name] = self._numbering.place(name, low * shape[1:].numel())
        return found

    def scatter(self, sums: Mapping[str, Tensor]) -> Tensors:
        """Of sums of whole parameters, all of one dtype, this rank's rows of the total."""
        wholes = [*sums.values()]
        pieces = RowPieces(self._world, [whole.shape for whole in wholes])
        return dict(zip(sums, pieces.scatter_sum(wholes), strict=True))

    def reduce(self, sums: Tensors) -> Tensors:
        """The sums: they are this rank's rows of the total already."""
        return sums

    def total(self, values: Tensor) -> Tensor:
        """The sum of a few numbers over all ranks."""
        return self._world.add_(values.clone())

    def spread(self, shares: Tensors) -> Tensors:
        """The shares: a rank updates its own rows."""
        return shares


class ShardedTotals:
    """What the referee asks of sharded ranks: a stock backward of all of them together.

    FSDP itself reduces and scatters the gradients. `coin` says whether the step that begins is
    compared, the same on every rank.
    """

    def __init__(
        self,
        sharding: Sharding,
        parameters: Mapping[str, nn.Parameter],
        coin: Callable[[], bool],
    ) -> None:
        self._sharding = sharding
        self._parameters = parameters
        self.coin = coin

    @property
    def computed_in(self) -> frozenset[torch.dtype]:
        """The types that weights are gathered in."""
        return self._sharding.computed_in

    def rows(self, outputs: list[Tensor], grads: list[Tensor]) -> Tensors:
        """This rank's rows of the gradients, summed over all ranks; FSDP gives their mean."""
        torch.autograd.backward(outputs, grads)
        found = {}
        for name, parameter in self._parameters.items():
            own, kind = held(parameter), sum_dtype(parameter.dtype)
            grad = None if parameter.grad is None else held(parameter.grad)
            rows = torch.zeros_like(own) if grad is None else grad * self._sharding.ranks
            found[name] = rows.to(kind)
            parameter.grad = None
        return found

    def is_any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""
        return self._sharding.is_any(flag)
