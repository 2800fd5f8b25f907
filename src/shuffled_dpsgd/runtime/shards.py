"""Parameters whose rows are spread over the ranks of a launch, as `fully_shard` leaves them.

Such a parameter is a DTensor. It has the shape of the whole and holds the rows of one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


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
    """Whether one of the tensors is spread over several processes. Asked of types, not tensors."""
    return any(kind.__name__ == "DTensor" for kind in set(map(type, tensors)))


def is_wrapped(model: nn.Module) -> bool:
    """Whether `fully_shard` was called on any module, whose class it has then replaced."""
    kinds = {type(module) for module in model.modules()}
    return any(base.__name__ == "FSDPModule" for kind in kinds for base in kind.__mro__)


def held(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor, sharing its memory: itself, unless it is spread."""
    if not is_sharded(tensor):
        return tensor
    return cast(Tensor, cast(Any, tensor)._local_tensor)


def parts_of(tensor: Tensor) -> list[Tensor]:
    """The ordinary tensors that a quantised one of torchao keeps, or the tensor itself."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [part for name in names for part in parts_of(getattr(tensor, name))]


def all_held(tensors: Iterable[Tensor]) -> list[Tensor]:
    """What this process holds of each of the tensors; see `held`."""
    found = [*tensors]
    return [*map(held, found)] if any_sharded(found) else found


class RowAxis(NamedTuple):
    """The axis of a mesh that the rows of a tensor are spread over, and this process on it.

    `ranks` is None where the tensor lies in another way than `fully_shard` leaves it: on one axis,
    or on the second of two, where the first has copies.
    """

    mesh: Any
    placements: tuple[Any, ...]
    ranks: int | None

    @classmethod
    def of(cls, tensor: Tensor) -> RowAxis:
        mesh, placements = cast(Any, tensor).device_mesh, tuple(cast(Any, tensor).placements)
        *copies, rows = placements
        plain = type(rows).__name__ == "Shard" and rows.is_shard(0)
        known = plain and len(copies) <= 1 and all(each.is_replicate() for each in copies)
        return cls(mesh, placements, int(mesh.size(mesh.ndim - 1)) if known else None)

    @property
    def rank(self) -> int:
        return int(self.mesh.get_local_rank(self.mesh.ndim - 1))

    @property
    def group(self) -> Any:
        return self.mesh.get_group(self.mesh.ndim - 1)


def spread_like(part: Tensor, whole: Tensor) -> Tensor:
    """What this process holds of a tensor like `whole`, as the tensor it is a part of.

    `part` itself where `whole` is not spread over processes. Made as FSDP makes its own: the public
    `from_local` takes three times as long, for every parameter in every step.
    """
    if not is_sharded(whole):
        return part
    kind, spec = cast(Any, type(whole)), cast(Any, whole)._spec
    return cast(Tensor, kind(part, spec, requires_grad=False))


class LiveParameters(Mapping[str, nn.Parameter]):
    """The trainable parameters as they are now, by name: whole while their module runs."""

    def __init__(self, model: nn.Module) -> None:
        self._places: dict[str, tuple[dict[str, nn.Parameter | None], str]] = {}
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                path, _, key = name.rpartition(".")
                self._places[name] = model.get_submodule(path)._parameters, key

    def __getitem__(self, name: str) -> nn.Parameter:
        held_by, key = self._places[name]
        return cast(nn.Parameter, held_by[key])

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


class SplitLayers(Protocol):
    """Layers that compute in parts on `ranks`; `names` are their trainable parameters.

    Every call is collective.
    """

    @property
    def names(self) -> Set[str]: ...

    @property
    def ranks(self) -> int: ...

    @property
    def leads(self) -> bool:
        """Whether this rank's gradients count where all ranks have the same."""
        ...

    def total(self, values: Tensor) -> Tensor:
        """The sum of a few numbers over all ranks."""
        ...

    def joint_norm(self, gradients: Mapping[str, Tensor]) -> float:
        """The norm of what all ranks have together, of which these are one rank's parts."""
        ...


class Sharding(Protocol):
    """A model with rows spread over `ranks`; `modules` are gathered and freed as wholes."""

    @property
    def ranks(self) -> int: ...

    @property
    def modules(self) -> Sequence[nn.Module]: ...

    @property
    def split(self) -> SplitLayers | None:
        """How layers compute in parts, if they do; all ranks then have the same samples."""
        ...

    def is_any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank; collective."""
        ...

    @property
    def computed_in(self) -> frozenset[torch.dtype]:
        """The types that weights are gathered in."""
        ...

    def unsharded(self) -> AbstractContextManager[None]:
        """Inside, each rank may run the model at will; entering and leaving are collective.

        Weights are sent on demand, layer by layer, by all ranks to those that need them.
        """
        ...

    @property
    def gradients_to(
        self,
    ) -> Callable[[Callable[[str, Tensor], None]], AbstractContextManager[None]] | None:
        """Inside `unsharded`: `take` gets whole gradients by name as they come, parameters none."""
        ...

    def reshard(self) -> None:
        """Have this rank hold its shards alone; whatever it wrote into whole weights is lost."""
        ...

    def scatter(self, sums: Mapping[str, Tensor]) -> Callable[[], dict[str, Tensor]]:
        """Begin to add up whole sums; collective. The result waits for this rank's rows."""
        ...
