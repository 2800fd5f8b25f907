"""Sharded models unsharded layer by layer, for runs that every rank makes by itself.

FSDP unshards weights by collective calls, so all ranks must run the model equally often. A check
runs it as often as it likes: on one rank, twice on another, with an error half way on a third. So
inside `LayerwiseUnshard.open` a rank that needs the weights of a module says so, and the ranks go
in rounds: each says which module it needs, or that it has done, and all of them send their rows of
the modules asked for. A rank that has done keeps answering until nobody asks any more.

A rank holds the weights of the root, which FSDP does not free in a forward either, and of one
module below it with the modules around that; and while others ask, one parameter at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shuffled_dpsgd.distributed.layouts import RowPieces
from shuffled_dpsgd.distributed.unshard_graph import UnshardedGraph, WeightPlace
from shuffled_dpsgd.distributed.world import World
from shuffled_dpsgd.errors import RankError
from shuffled_dpsgd.runtime.shards import held

_DONE = -1


@dataclass(frozen=True, kw_only=True)
class ShardedWeight:
    """One parameter: its shard, and the modules that hold it, several if it is tied.

    The whole is gathered in `dtype`, as the policy of its module says.
    """

    name: str
    shard: nn.Parameter
    owners: tuple[tuple[nn.Module, str], ...]
    dtype: torch.dtype

    def put(self, value: Tensor) -> None:
        """Have the modules use this tensor as the weight."""
        for owner, key in self.owners:
            owner._parameters[key] = value  # type: ignore[assignment]
            if isinstance(owner, nn.RNNBase):
                # Recurrent layers keep a list of their weights besides.
                names = owner._flat_weights_names
                owner._flat_weights = [getattr(owner, name) for name in names]

    def gathered(self, world: World) -> Tensor:
        """The whole weight, from the rows of all ranks."""
        pieces = RowPieces(world, [self.shard.shape])
        (whole,) = pieces.gather([held(self.shard).detach()], self.dtype)
        return whole


@dataclass(frozen=True, kw_only=True)
class ShardedModule:
    """A module that is unsharded as one; `around` are the numbers of those it is inside."""

    module: nn.Module
    weights: tuple[ShardedWeight, ...]
    around: frozenset[int]


class LayerwiseUnshard:
    """What this rank holds of the modules' weights while it runs the model by itself.

    Inside `open`, `enter` and `leave` are called around every run of a module. The root is the
    first of `modules`, whose weights are at hand from the beginning: checks call its forward
    without its hooks.
    """

    def __init__(self, world: World, modules: Sequence[ShardedModule]) -> None:
        self.is_open = False
        self.dtypes = frozenset(weight.dtype for each in modules for weight in each.weights)
        self._world = world
        self._modules = modules
        self._numbers = {id(each.module): number for number, each in enumerate(modules)}
        # Whole weights at hand, and the modules that they stand in.
        self._wholes: dict[int, list[Tensor]] = {}
        self._placed: list[int] = []
        self._graph: UnshardedGraph | None = None

    @contextmanager
    def open(self) -> Iterator[None]:
        """Inside, this rank may run the model at will, or not at all; all ranks must enter."""
        self.is_open = True
        try:
            self._hold(0)
            self._place(0)
            yield
            self._finish()
        except RankError:
            raise
        except Exception:
            self._finish()
            raise
        finally:
            self._reshard()
            self.is_open = False

    @contextmanager
    def gradients_to(self, take: Callable[[str, Tensor], None]) -> Iterator[None]:
        """Inside `open`: give whole gradients to `take`, one by one, as a backward finds them."""
        graph = UnshardedGraph(
            find=lambda place: self._hold(place.module)[place.weight],
            placed=self._placed_weights,
            take=take,
        )
        self._graph = graph
        try:
            with torch.autograd.graph.saved_tensors_hooks(graph.pack, graph.unpack):
                yield
            graph.finish()
        finally:
            self._graph = None
            for number in tuple(self._placed):
                # What a run that ended half way has left there are parts of its graph.
                self._unplace(number)
            self._place(0)

    def enter(self, module: nn.Module) -> None:
        """A module is about to run: put its whole weights in place of the shards."""
        number = self._numbers[id(module)]
        around = self._modules[number].around
        for other in [n for n in self._placed if n not in around and n != number]:
            # Left by a run that ended half way, as recomputations of checkpoints do.
            self._unplace(other)
        self._hold(number)
        self._place(number)

    def leave(self, module: nn.Module, output: Any) -> None:
        """A module has run. Its weights stay at hand until others are needed.

        They are put in place again when a backward reaches its output: a checkpoint inside its
        forward computes again then, and runs none of the module's hooks.
        """
        number = self._numbers[id(module)]
        self._unplace(number)
        if number == 0:
            self._place(0, with_graph=False)
        elif self._graph is not None:
            come_back = partial(self._come_back, module, self._graph)
            for tensor in tree_leaves(output):
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    tensor.register_hook(come_back)

    def _come_back(self, module: nn.Module, graph: UnshardedGraph, _: Tensor) -> None:
        """A backward is about to go through a module; what is computed again needs gradients."""
        if self._graph is graph:
            with torch.enable_grad():
                self.enter(module)

    def _placed_weights(self) -> Iterator[tuple[WeightPlace, Tensor]]:
        for number in self._placed:
            for weight, whole in enumerate(self._wholes[number]):
                yield WeightPlace(number, weight), whole

    def _hold(self, number: int) -> list[Tensor]:
        """The whole weights of a module; what is needed neither by it nor by a run is dropped."""
        kept = self._modules[number].around | {number, 0, *self._placed}
        for other in self._wholes.keys() - kept:
            del self._wholes[other]
        if number not in self._wholes:
            self._go_round(number)
        return self._wholes[number]

    def _place(self, number: int, *, with_graph: bool = True) -> None:
        graph = self._graph if with_graph and torch.is_grad_enabled() else None
        for whole, weight in zip(self._wholes[number], self._modules[number].weights, strict=True):
            in_graph = graph is not None and weight.shard.requires_grad
            weight.put(graph.use(weight.name, whole) if graph and in_graph else whole)
        if number not in self._placed:
            self._placed.append(number)

    def _unplace(self, number: int) -> None:
        for weight in self._modules[number].weights:
            weight.put(weight.shard)
        if number in self._placed:
            self._placed.remove(number)

    def _reshard(self) -> None:
        for number in tuple(self._placed):
            self._unplace(number)
        self._wholes.clear()

    def _finish(self) -> None:
        """Send rows to those that ask for them, until nobody does."""
        self._reshard()
        while self._go_round(_DONE):
            pass

    def _go_round(self, wanted: int) -> bool:
        """One round: every rank says what it needs. Returns whether any needed something."""
        asked = sorted(set(map(int, self._world.gather_texts(str(wanted)))) - {_DONE})
        for number in asked:
            found = []
            for weight in self._modules[number].weights:
                whole = weight.gathered(self._world)
                if number == wanted:
                    found.append(whole)
            if number == wanted:
                self._wholes[number] = found
        return bool(asked)


def sharded_modules(model: nn.Module, wrapped: Sequence[Any]) -> list[ShardedModule]:
    """What `fully_shard` was called on, the root first, each with the weights that are its own.

    A weight belongs to the innermost of them around it.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for key, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            owners.setdefault(id(parameter), []).append((module, key))
    inside = {id(module): {id(child) for child in module.modules()} for module in wrapped}
    taken: set[int] = set()
    found: dict[int, list[nn.Parameter]] = {}
    # From the innermost outwards.
    for module in sorted(wrapped, key=lambda each: len(inside[id(each)])):
        own = [p for p in module.parameters() if id(p) not in taken]
        taken.update(map(id, own))
        found[id(module)] = own
    return [
        ShardedModule(
            module=module,
            weights=tuple(
                ShardedWeight(
                    name=names[id(shard)],
                    shard=shard,
                    owners=tuple(owners[id(shard)]),
                    dtype=module._get_fsdp_state()._mp_policy.param_dtype or shard.dtype,
                )
                for shard in found[id(module)]
            ),
            around=frozenset(
                number
                for number, other in enumerate(wrapped)
                if other is not module and id(module) in inside[id(other)]
            ),
        )
        for module in wrapped
    ]
