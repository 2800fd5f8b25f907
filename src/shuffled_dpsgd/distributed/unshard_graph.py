"""An autograd graph that keeps no whole weights: they are gathered again for the backward.

Autograd saves weights for the backward, and the gradients of all parameters until somebody takes
them. Either would be a whole model on every rank. Here what a graph saves of a whole weight is a
note of which one it is, and a gradient is passed on, and forgotten, as soon as it is complete.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from shuffled_dpsgd.errors import UnsupportedModuleError


class WeightPlace(NamedTuple):
    """Which weight: the number of its module, and its own there."""

    module: int
    weight: int


@dataclass(frozen=True, kw_only=True)
class _Note:
    """A saved tensor that is a view of a whole weight, or of a copy of it in another type."""

    place: WeightPlace
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class UnshardedGraph:
    """The whole weights that one forward uses, and the gradients of its backward.

    `find` returns a whole weight, gathered again if need be; `placed` are those that stand in
    modules; `take` gets the gradient of each weight once.
    """

    def __init__(
        self,
        *,
        find: Callable[[WeightPlace], Tensor],
        placed: Callable[[], Iterator[tuple[WeightPlace, Tensor]]],
        take: Callable[[str, Tensor], None],
    ) -> None:
        self._find = find
        self._placed = placed
        self._take = take
        self._anchor = torch.zeros((), requires_grad=True)
        # How often a weight was used, so that its gradient is known to be complete.
        self._uses: Counter[str] = Counter()
        self._parts: dict[str, Tensor] = {}
        self._taken: set[str] = set()

    def use(self, name: str, whole: Tensor) -> Tensor:
        """The weight as a part of the graph."""
        if torch._C._current_graph_task_id() < 0:
            # What a checkpoint computes again, inside the backward, was counted before.
            self._uses[name] += 1
        return cast(Tensor, _Use.apply(self._anchor, whole, name, self.receive))

    def receive(self, name: str, grad: Tensor) -> None:
        """A gradient has arrived; the last one of a weight completes it."""
        if name in self._taken:
            raise UnsupportedModuleError(
                name,
                expected="a gradient that a backward computes in one go",
                got="one in parts, as from re-entrant checkpointing of a module that runs twice",
                remedy="checkpoint with use_reentrant=False",
            )
        earlier = self._parts.pop(name, None)
        grad = grad if earlier is None else earlier + grad
        self._uses[name] -= 1
        if self._uses[name] > 0:
            self._parts[name] = grad
        else:
            self._give(name, grad)

    def finish(self) -> None:
        """The backward is over: uses that led nowhere send no gradient."""
        for name, grad in self._parts.items():
            self._give(name, grad)
        self._parts = {}

    def _give(self, name: str, grad: Tensor) -> None:
        self._taken.add(name)
        self._take(name, grad)

    def pack(self, tensor: Tensor) -> Any:
        """What a graph keeps of a tensor: itself, or a note of the weight that it belongs to."""
        if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            return tensor
        storage = tensor.untyped_storage()
        for place, whole in self._placed():
            if storage.data_ptr() == whole.untyped_storage().data_ptr() or _is_cast(tensor, whole):
                return _Note(
                    place=place,
                    dtype=tensor.dtype,
                    size=tensor.shape,
                    stride=tensor.stride(),
                    offset=int(tensor.storage_offset()),
                )
        return tensor

    def unpack(self, kept: Any) -> Tensor:
        """The tensor again; its weight is gathered once more if need be."""
        if not isinstance(kept, _Note):
            return cast(Tensor, kept)
        whole = self._find(kept.place).to(kept.dtype)
        return whole.as_strided(kept.size, kept.stride, kept.offset)


def _is_cast(tensor: Tensor, whole: Tensor) -> bool:
    """Whether a tensor is the weight, or a view of it, rounded to another type, as by autocast."""
    if tensor.dtype is whole.dtype or not tensor.is_floating_point() or tensor.dim() == 0:
        return False
    size = tensor.untyped_storage().nbytes() // tensor.element_size()
    if size != whole.numel():
        return False
    copy = tensor.detach().as_strided((size,), (1,), 0)
    return torch.equal(copy, whole.reshape(-1).to(tensor.dtype))


class _Use(torch.autograd.Function):
    """A weight in the graph without being kept by it; passes its gradient on."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, whole: Tensor, name: str, receive: Callable[[str, Tensor], None]
    ) -> Tensor:
        ctx.name, ctx.receive = name, receive
        ctx.set_materialize_grads(False)
        return whole.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        if grad is not None:
            ctx.receive(ctx.name, grad)
        return None, None, None, None
