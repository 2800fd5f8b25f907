"""Models that `torch.distributed.fsdp.fully_shard` has spread over all ranks.

Every rank holds some rows of every parameter. On a mesh of two axes the ranks of the second axis
share a model, and the groups along the first have copies of it. While a module runs, FSDP gathers
its weights: that is collective, so all ranks must run the model equally often. Whoever needs to run
it at will has it unsharded layer by layer, as checks do, or gathers all of them first. FSDP's hooks
then do no more than cast until the weights are shards again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_map_only

from shuffled_dpsgd.distributed.exchange import ShardedSums
from shuffled_dpsgd.distributed.sharding_refusals import refuse_axes, refuse_unsupported
from shuffled_dpsgd.distributed.tensor_parallel import TensorParallelModel
from shuffled_dpsgd.distributed.unshard import LayerwiseUnshard, sharded_modules
from shuffled_dpsgd.distributed.world import World
from shuffled_dpsgd.runtime.shards import RowAxis, any_sharded
from shuffled_dpsgd.runtime.uncompiled import eagerly


def find_sharding(world: World, model: nn.Module, mesh: Any = None) -> AnySharding | None:
    """The sharding of a model, or None where every rank has the whole of it.

    With a `mesh` it must be the one the model lies on.

    Raises:
        UnsupportedModuleError: the model is spread in a way that is not supported.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # A forward without a backward leaves the root's weights whole.
    if not any_sharded(model.parameters()):
        return None
    split = not any(isinstance(module, FSDPModule) for module in model.modules())
    refuse_axes(model, mesh, known=("tp", "sp") if split else ())
    if split:
        return TensorParallelModel(world, model, mesh)
    refuse_unsupported(world, model, mesh)
    return ShardedModel(world, model)


class ShardedModel:
    """The weights of a sharded model: in shards, or for a while whole on every rank.

    FSDP's hooks are replaced by ones that ask whether the weights are whole, until `detach`.
    """

    split = None

    def __init__(self, world: World, model: nn.Module) -> None:
        self._world = world
        axis = RowAxis.of(next(model.parameters()))
        groups = axis.mesh.mesh.view(-1, axis.ranks)
        # One group is all ranks, who know each other already.
        self.shards = world.divided(groups.tolist()) if len(groups) > 1 else world
        self.copies = world.divided(groups.T.tolist()) if len(groups) > 1 else World()
        self._root = model
        self._policy: Any = cast(Any, model)._get_fsdp_state()._mp_policy
        self._wrapped = [m for m in model.modules() if isinstance(m, FSDPModule)]
        self._is_whole = False
        self._is_read = False
        self._hooks: list[tuple[dict[int, Any], int, Any]] = []
        for module in self._wrapped:
            # FSDP sets its shards up when it first needs them whole; later they stay in place.
            module.unshard()
            module.reshard()
            self._take_hooks(module)
        self._layerwise = LayerwiseUnshard(self.shards, sharded_modules(model, self._wrapped))
        trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.sums = ShardedSums(world, self.shards, self.copies, trainable)

    @property
    def ranks(self) -> int:
        """How many ranks share the rows."""
        return self.shards.size

    def factor(self, name: str) -> int:
        """What FSDP's mean over all ranks, copies included, is multiplied by to be their sum."""
        return self._world.size

    @property
    def modules(self) -> Sequence[nn.Module]:
        """What `fully_shard` was called on."""
        return [module for module in self._wrapped if isinstance(module, nn.Module)]

    def is_any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank; collective."""
        return self._world.is_any(flag)

    @property
    def computed_in(self) -> frozenset[torch.dtype]:
        """The types that weights are gathered in."""
        return self._layerwise.dtypes

    @contextmanager
    def unsharded(self) -> Iterator[None]:
        """Inside, each rank may run the model at will; see `Sharding.unsharded`."""
        self.reshard()
        with self._casting(), eagerly(), self._layerwise.open():
            yield

    def gradients_to(self, take: Callable[[str, Tensor], None]) -> AbstractContextManager[None]:
        """Give whole gradients to `take`; see `Sharding.gradients_to`."""
        return self._layerwise.gradients_to(take)

    def reshard(self) -> None:
        """Have this rank hold its shards alone; whatever it wrote into whole weights is lost."""
        self._is_whole = False
        for module in self._wrapped:
            module.reshard()

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Whole weights on every rank inside, shards afterwards; entering is collective."""
        self.reshard()
        for module in self._wrapped:
            module.unshard()
        self._is_whole = True
        try:
            with self._casting():
                yield
        finally:
            self.reshard()

    def scatter(self, sums: Mapping[str, Tensor]) -> Callable[[], dict[str, Tensor]]:
        """Begin to add up sums shaped like whole parameters; see `Sharding.scatter`."""
        return self.sums.scatter(sums)

    def detach(self) -> None:
        """Leave the model as `fully_shard` left it."""
        self.reshard()
        for hooks, key, original in self._hooks:
            if key in hooks:
                hooks[key] = original
        self._hooks = []

    @contextmanager
    def as_written(self) -> Iterator[None]:
        """Modules as their author made them: without what FSDP does when they run, and with the
        classes that `fully_shard` subclasses. For those who read a model and do not compute."""
        kinds = [(module, type(module)) for module in self._wrapped]
        for module, kind in kinds:
            # The class FSDP made, FSDPModule, and then the author's.
            module.__class__ = kind.__mro__[2]
        self._is_read = True
        try:
            yield
        finally:
            self._is_read = False
            for module, kind in kinds:
                module.__class__ = kind

    @contextmanager
    def _casting(self) -> Iterator[None]:
        """Cast inputs also where the root's forward is called without its hooks, as checks do."""
        casts = self._policy.param_dtype is not None and "forward" not in self._root.__dict__
        if casts:
            self._root.__dict__["forward"] = self._cast_forward
        try:
            yield
        finally:
            if casts:
                self._root.__dict__.pop("forward", None)

    def _cast_forward(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = _inputs(self._policy, args, kwargs) or (args, kwargs)
        return type(self._root).forward(self._root, *args, **kwargs)

    def _take_hooks(self, module: Any) -> None:
        """Have FSDP's hooks do no more than its casts while the weights are unsharded by us."""
        state = module._get_fsdp_state()
        policy = state._mp_policy

        def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
            if self._is_read:
                return None
            if self._layerwise.is_open:
                self._layerwise.enter(module)
            elif not self._is_whole:
                with self.shards.meeting():
                    return gathering(module, args, kwargs)
            return _inputs(policy, args, kwargs)

        def after(module: nn.Module, args: Any, output: Any) -> Any:
            if self._is_read:
                return None
            if self._layerwise.is_open:
                self._layerwise.leave(module, output)
            elif not self._is_whole:
                return freeing(module, args, output)
            return _cast(output, policy.output_dtype)

        start, end = state._pre_forward_hook_handle.id, state._post_forward_hook_handle.id
        gathering, freeing = module._forward_pre_hooks[start], module._forward_hooks[end]
        self._hooks += [
            (module._forward_pre_hooks, start, gathering),
            (module._forward_hooks, end, freeing),
        ]
        # As FSDP's own, they are no part of what a compiler traces.
        module._forward_pre_hooks[start] = torch.compiler.disable(before)
        module._forward_hooks[end] = torch.compiler.disable(after)


AnySharding = ShardedModel | TensorParallelModel


def _inputs(policy: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """The inputs of a module as its mixed-precision policy casts them; None if it does not."""
    if policy.param_dtype is None or not policy.cast_forward_inputs:
        return None
    return _cast(args, policy.param_dtype), _cast(kwargs, policy.param_dtype)


def _cast(value: Any, dtype: torch.dtype | None) -> Any:
    """All floating-point tensors inside, in `dtype`; None without one."""
    if dtype is None:
        return None
    return tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, value)
