"""Models whose linear layers `parallelize_module` has split over all ranks.

Every rank has the same records and draws the same random numbers. It computes with its part of
every layer, so all ranks run the model together, in checks as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn

from shuffled_dpsgd.core.clip import sum_dtype
from shuffled_dpsgd.core.noise import Place
from shuffled_dpsgd.distributed.layouts import RowPieces, row_places
from shuffled_dpsgd.distributed.world import World
from shuffled_dpsgd.errors import RefereeError, UnsupportedModuleError
from shuffled_dpsgd.runtime.shards import SplitLayers, is_sharded

Tensors = dict[str, Tensor]
# Rounding of a total of squares that is formed in another order.
_ROOM = 1e-4
_REMEDY = (
    "split linear layers by parallelize_module with ColwiseParallel() and RowwiseParallel(), over "
    "a mesh of one axis, into parts of equal size; leave everything else whole"
)


class TensorParallelModel:
    """A model split over all ranks of a launch; see `Sharding`."""

    computed_in = frozenset[torch.dtype]()
    gradients_to = None

    def __init__(self, world: World, model: nn.Module, mesh: Any = None) -> None:
        self._world = self.shards = world
        self.copies = World()
        self.modules = [
            m for m in model.modules() if any(map(is_sharded, m.parameters(recurse=False)))
        ]
        _refuse_unsupported(world, model, self.modules, mesh)
        parts = {id(p) for module in self.modules for p in module.parameters(recurse=False)}
        names = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.names = frozenset(name for name, p in names.items() if id(p) in parts)
        self.sums = TensorParallelSums(world, names)

    @property
    def ranks(self) -> int:
        return self._world.size

    @property
    def leads(self) -> bool:
        """Whether this rank's gradients count where all ranks have the same."""
        return self._world.leads

    @property
    def split(self) -> SplitLayers:
        return self

    def joint_norm(self, gradients: Mapping[str, Tensor]) -> float:
        """The norm of a gradient of which all ranks have parts, by other messages than `total`."""
        found = self._world.gather_texts(repr(self.sums.square(gradients)))
        return math.sqrt(sum(map(float, found)))

    def total(self, values: Tensor) -> Tensor:
        """The sum of a few numbers over all ranks; collective."""
        return self._world.add_(values)

    def factor(self, name: str) -> int:
        """What torch's gradients are multiplied by, to have what the engine has on this rank."""
        return int(self.sums.counts(name))

    def is_any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank; collective."""
        return self._world.is_any(flag)

    def unsharded(self) -> AbstractContextManager[None]:
        """Nothing changes: no rank can run the model by itself."""
        return nullcontext()

    whole = as_written = unsharded

    def scatter(self, sums: Mapping[str, Tensor]) -> Callable[[], Tensors]:
        """Nothing to send: a rank forms the sums of its own parts."""
        return lambda: dict(sums)

    def reshard(self) -> None:
        """Nothing to let go of."""

    def detach(self) -> None:
        """Nothing is attached."""


class TensorParallelSums:
    """The exchange of ranks of which each has its parts of the sums of all records.

    A rank makes some rows of every parameter private. A layer split by outputs lies like that
    already. A layer split by inputs is laid in its whole shape, with zeros for the rest, and
    reduce-scattered; afterwards it is gathered. So is what is not split. Of that rank 0's sums are
    released, and no others, because the clip has counted their norms.
    """

    def __init__(self, world: World, parameters: Mapping[str, Tensor]) -> None:
        self._world = world
        self._axes = {name: _axis(p) for name, p in parameters.items()}
        self.parts = {name for name, axis in self._axes.items() if axis is not None}
        self._shapes = {name: p.shape for name, p in parameters.items()}
        self._starts = row_places(world, parameters)
        # What is sent together: small things, and a large matrix by itself.
        messages: dict[object, list[str]] = {}
        for name, parameter in parameters.items():
            alone = name if self._axes[name] == 1 else ""
            if self._axes[name] != 0:
                messages.setdefault((alone, sum_dtype(parameter.dtype)), []).append(name)
        self._messages = [(names, self._pieces(names)) for names in messages.values()]

    def places(self) -> Mapping[str, Place]:
        """This rank's rows of every parameter."""
        return self._starts

    def reduce(self, sums: Tensors) -> Tensors:
        """This rank's rows of all sums.

        Raises:
            RefereeError: the rows are not as long as the parts.
        """
        shares = dict(sums)
        for names, pieces in self._messages:
            wholes = [sums[name].new_zeros(self._shapes[name]) for name in names]
            for name, whole in zip(names, wholes, strict=True):
                if self.counts(name):
                    self._part(name, whole).copy_(sums[name])
            rows = pieces.scatter_sum(wholes)()
            shares.update(zip(names, rows, strict=True))
        squares = [self.square(sums), _square(shares.values())]
        before, after = self.total(torch.tensor(squares, dtype=torch.float64)).tolist()
        if not abs(before - after) <= _ROOM * before:
            raise RefereeError(
                "rows of the sums are not as long as the parts they were made of; nothing was "
                "released: the exchange between ranks is at fault"
            )
        return shares

    def over_all(self, parts: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Nothing is left to add up."""
        return parts

    def total(self, values: Tensor) -> Tensor:
        """The sum of a few numbers over all ranks."""
        return self._world.add_(values.clone())

    def spread(self, shares: Tensors) -> Tensors:
        """This rank's parts of private gradients, from the rows of all ranks."""
        found = dict(shares)
        for names, pieces in self._messages:
            wholes = pieces.gather([shares[name] for name in names], shares[names[0]].dtype)
            for name, whole in zip(names, wholes, strict=True):
                found[name] = self._part(name, whole.view(self._shapes[name])).contiguous()
        return found

    def square(self, tensors: Mapping[str, Tensor]) -> float:
        """This rank's part of the square of what all ranks have together."""
        return _square(own for name, own in tensors.items() if self.counts(name))

    def counts(self, name: str) -> bool:
        """Whether this rank's sum of a parameter is a part of the total."""
        return name in self.parts or self._world.leads

    def _pieces(self, names: Sequence[str]) -> RowPieces:
        return RowPieces(self._world, [self._shapes[name] or torch.Size([1]) for name in names])

    def _part(self, name: str, whole: Tensor) -> Tensor:
        """What this rank has of a whole tensor split by inputs, or all of another."""
        if self._axes[name] != 1:
            return whole
        return whole.chunk(self._world.size, dim=1)[self._world.rank]


def _square(tensors: Iterable[Tensor]) -> float:
    return sum(float(tensor.double().square().sum()) for tensor in tensors)


def _axis(parameter: Tensor) -> int | None:
    """The axis that a parameter is split along, if it is."""
    if not is_sharded(parameter):
        return None
    (placement,) = cast(Any, parameter).placements
    return int(placement.dim) if placement.is_shard() else None


def _refuse_unsupported(
    world: World, model: nn.Module, modules: Sequence[nn.Module], mesh: Any
) -> None:
    """Refuse all but linear layers split into equal parts over all ranks.

    Raises:
        UnsupportedModuleError: naming the module.
    """
    paths = {id(module): path for path, module in model.named_modules()}
    for module in model.modules():
        if getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod"):
            raise UnsupportedModuleError(
                paths[id(module)],
                expected="modules that are not compiled, where layers are split over ranks",
                got="torch.compile",
                remedy="leave it out",
            )
    for module in modules:
        path, parameters = paths[id(module)], [*module.parameters(recurse=False)]
        for own in {cast(Any, p).device_mesh for p in parameters if is_sharded(p)}:
            if own.mesh.tolist() != [*range(world.size)] or mesh not in (None, own):
                raise UnsupportedModuleError(
                    path,
                    expected=f"a mesh of one axis with all {world.size} ranks, as make_private's",
                    got=f"{own}",
                    remedy=_REMEDY,
                )
        axes = [_axis(p) for p in parameters]
        fits = axes in ([0], [0, 0], [1], [1, None]) and all(map(is_sharded, parameters))
        even = fits and parameters[0].shape[cast(int, axes[0])] % world.size == 0
        if type(module) is not nn.Linear or not even:
            layouts = [str(getattr(p, "placements", "whole")) for p in parameters]
            raise UnsupportedModuleError(
                path,
                expected="a linear layer split evenly by its outputs or its inputs",
                got=f"{type(module).__name__} of {layouts}",
                remedy=_REMEDY,
            )
