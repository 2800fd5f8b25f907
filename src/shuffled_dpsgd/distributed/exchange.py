"""How the ranks' sums become one release: added up once, noised once, in the hands of every rank.

Replicated ranks have the whole model each, sharded ranks some rows of every parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from shuffled_dpsgd.core.clip import sum_dtype
from shuffled_dpsgd.core.noise import Place
from shuffled_dpsgd.distributed.layouts import Numbering, RowPieces, row_places
from shuffled_dpsgd.distributed.world import World
from shuffled_dpsgd.errors import RefereeError
from shuffled_dpsgd.runtime.shards import Span, held

if TYPE_CHECKING:
    from shuffled_dpsgd.distributed.sharding import AnySharding

Tensors = dict[str, Tensor]


class ReplicatedSums:
    """The exchange of ranks that have the whole model each, and sums of their own samples.

    The sums are laid in one vector per dtype and reduce-scattered, so that each rank holds the
    total of an equal share of all coordinates. It clips and noises that share; gathering the shares
    gives every rank the same bits. Both together move as much as one all-reduce.

    `starts` is where each parameter begins in the release, if these are a part of all coordinates.
    """

    def __init__(
        self,
        world: World,
        parameters: Mapping[str, Tensor],
        starts: Mapping[str, Place] | None = None,
    ) -> None:
        self._world = world
        self._numbering = Numbering(parameters)
        self._starts = starts or {name: self._numbering.place(name) for name in parameters}
        self._vectors: list[Tensor] = []
        # Rounded up, so that every rank has as many.
        self._per_rank = [-(-total // world.size) for total in self._numbering.totals]

    def places(self) -> Mapping[str, Place]:
        """This rank's run of the coordinates of every dtype."""
        found = dict(self._starts)
        for group in range(len(self._numbering.totals)):
            for name in self._numbering.names(group):
                kind, first = self._starts[name]
                found[name] = Place(kind, first + self._span(group, name).low)
        return found

    def reduce(self, sums: Tensors) -> Tensors:
        """This rank's share of the total over all ranks, a part of every tensor."""
        self._vectors = [self._laid_out(group, sums) for group in range(len(self._per_rank))]
        shares = {name: total.flatten() for name, total in sums.items() if not total.numel()}
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
        whole = {
            name: shares[name].view(shape)
            for name, shape in self._numbering.shapes.items()
            if not shape.numel()
        }
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

    The sums of a layer are reduce-scattered among `shards` as soon as they are formed: each rank
    adds its rows of the total to its own and drops the rest. So there is nothing left to reduce
    when a step is complete, and nothing to gather afterwards, since a rank updates its own rows.

    Where the model lies on several groups of ranks, those with the same rows are `copies` of each
    other. Once a step they add their rows up, as replicated ranks add up whole models.
    """

    def __init__(
        self, everyone: World, shards: World, copies: World, parameters: Mapping[str, Tensor]
    ) -> None:
        self._everyone = everyone
        self._shards = shards
        self._copies = copies
        self._starts = row_places(shards, parameters)
        self._among_copies: ReplicatedSums | None = None
        if copies.size > 1:
            rows = {name: held(tensor).detach() for name, tensor in parameters.items()}
            self._among_copies = ReplicatedSums(copies, rows, self._starts)
        self._expected: Tensors = {}

    def places(self) -> Mapping[str, Place]:
        """This rank's rows of every parameter, or its share of the rows that copies have too."""
        return self._starts if self._among_copies is None else self._among_copies.places()

    def scatter(self, sums: Mapping[str, Tensor]) -> Callable[[], Tensors]:
        """Begin to reduce-scatter sums of whole parameters, all of one dtype.

        What is returned waits for this rank's rows of the total over `shards`.
        """
        wholes = [*sums.values()]
        names = tuple(sums)
        pieces = RowPieces(self._shards, [whole.shape for whole in wholes])
        finish = pieces.scatter_sum(wholes)
        return lambda: dict(zip(names, finish(), strict=True))

    def over_all(self, rows: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The total over all ranks of rows that `scatter` gave; the next `reduce` must find it."""
        if self._among_copies is None:
            return rows
        self._expected = {name: self._copies.add_(own.clone()) for name, own in rows.items()}
        return self._expected

    def reduce(self, sums: Tensors) -> Tensors:
        """This rank's share of the total over copies; without copies, its rows of the total.

        Raises:
            RefereeError: another total than `over_all` has found.
        """
        if self._among_copies is None:
            return sums
        expected, self._expected = self._expected, {}
        shares = self._among_copies.reduce(sums)
        places = self._among_copies.places()
        wrong = ""
        for name, rows in expected.items():
            low, share = places[name].first - self._starts[name].first, shares[name]
            own = rows.view(-1)[low : low + share.numel()]
            if not torch.allclose(share, own, rtol=1e-4, atol=1e-4 * _largest(rows)):
                wrong = wrong or name
        if expected and self._everyone.is_any(bool(wrong)):
            raise RefereeError(
                f"{wrong or 'a parameter of another process'}: the total over all copies of the "
                "model is not the sum of their rows; nothing was released: the exchange between "
                "them is at fault"
            )
        return shares

    def total(self, values: Tensor) -> Tensor:
        """The sum of a few numbers over all ranks."""
        return self._everyone.add_(values.clone())

    def spread(self, shares: Tensors) -> Tensors:
        """This rank's rows, which it updates: the shares themselves, or those of all copies."""
        return shares if self._among_copies is None else self._among_copies.spread(shares)


class ShardedTotals:
    """What the referee asks of sharded ranks: a stock backward of all of them together.

    FSDP itself reduces the gradients over all of them. `coin` says whether the step that begins is
    compared, the same on every rank.
    """

    def __init__(
        self,
        sharding: AnySharding,
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
            rows = torch.zeros_like(own) if grad is None else grad * self._sharding.factor(name)
            found[name] = rows.to(kind)
            parameter.grad = None
        return found

    def over_all(self, rows: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The total over all ranks of the rows that the engine has."""
        return self._sharding.sums.over_all(rows)

    def is_any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""
        return self._sharding.is_any(flag)


def _largest(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0
