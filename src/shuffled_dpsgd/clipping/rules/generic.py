"""The exact rule for any module: run it once per sample, with per-sample copies of its parameters.

The copies are views, so they cost no memory; their gradients are the per-sample gradients. The
module and everything inside it run under `torch.func.vmap` or, where that fails, in a loop.

Shapes: B samples, S any parameter shape.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from shuffled_dpsgd.clipping.capture.captures import Capture, CopyGradients
from shuffled_dpsgd.clipping.capture.slot import Slot, batch_of, recorder_of, size_of
from shuffled_dpsgd.clipping.contributions.kinds import Contribution, DenseGrad
from shuffled_dpsgd.clipping.rules.mapping import (
    Bare,
    Outputs,
    at_once,
    batch_axes,
    batched_leaves,
    one_by_one,
)
from shuffled_dpsgd.clipping.rules.trial_runs import buffers_kept, in_eval_mode
from shuffled_dpsgd.errors import UnsupportedModuleError

if TYPE_CHECKING:
    from shuffled_dpsgd.clipping.capture.batch import CapturedBatch

_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3}
_HALF_TOLERANCE = 5e-2
# Ways in which a module fails that cannot be run one sample at a time.
FAILURES = (RuntimeError, ValueError, IndexError, TypeError)


class ModuleCall(NamedTuple):
    """One call of a module: its trainable parameters, flat inputs, their structure, the batch."""

    trainable: Mapping[str, Tensor]
    leaves: list[Any]
    spec: TreeSpec
    size: int


class CopiesFunction(torch.autograd.Function):
    """One copy of a parameter per sample; the backward records the copies' gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        parameter: Tensor,
        part: int,
        slot: CopiesSlot,
        batch: CapturedBatch,
        anchor: Tensor,
    ) -> Tensor:
        ctx.part, ctx.slot, ctx.batch = part, slot, batch
        return parameter.expand(size_of(batch), *parameter.shape)

    @staticmethod
    def backward(ctx: Any, grads_BS: Tensor) -> Any:
        part = ctx.part
        anchor = recorder_of(ctx.slot).record(ctx.batch, ctx.slot, (grads_BS,), part)
        return None, None, None, None, anchor


class CopiesSlot(Slot):
    """A slot whose entries are (which of its parameters, per-sample gradients)."""

    def __init__(self, **site: Any) -> None:
        super().__init__(**site)
        self.keys = list(self.names)
        self.bare = Bare(self)
        # Of outputs whose batch is not on the first axis, known once they have been compared.
        self.output_axes: dict[int, int] = {}
        # Inputs known to have the batch's length on their first axis by accident only.
        self.unbatched: set[int] = set()

    @property
    def is_compared(self) -> bool:
        """Whether its outputs are compared with those of the whole batch, or have been."""
        return not torch.compiler.is_compiling()

    def copies(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Per-sample copies of the slot's parameters, each one recorded call."""
        batch = batch_of(self)
        if self.recorder.batch is not None:
            batch.calls[self.index] += len(parameters) - 1
        found = {}
        for key, parameter in parameters.items():
            part = self.keys.index(key)
            anchor = recorder_of(self).anchor
            found[key] = CopiesFunction.apply(parameter, part, self, batch, anchor)
        return found

    def captured(self, part: int, tensors: Sequence[Tensor]) -> Capture:
        return CopyGradients(part, tensors[0])

    def contributions(self, capture: Capture) -> Iterator[tuple[str, Contribution]]:
        assert isinstance(capture, CopyGradients)
        yield self.names[self.keys[capture.part]], DenseGrad(grads_BS=capture.grads_BS)


class GenericSlot(CopiesSlot):
    """Any module whose samples do not interact; its children have no slots of their own."""

    kind = "generic"
    may_fold = True
    runs_module = True

    def __init__(self, **site: Any) -> None:
        super().__init__(**site)
        self._checked: set[Hashable] = set()
        self._map = at_once
        self._has_warned = False

    @property
    def is_compared(self) -> bool:
        return bool(self._checked) or super().is_compared

    def folded_forward(self) -> Callable[..., Any]:
        return self.forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.plain(*args, **kwargs)
        batch_size = size_of(self.recorder.batch or self.recorder.recomputed_batch(self.path))
        leaves, spec = tree_flatten((args, kwargs))
        trainable = {k: p for k, p in self.module.named_parameters() if k in self.names}
        if batch_size == 0:
            return self._run_empty(trainable, args, kwargs)
        call = ModuleCall(trainable, leaves, spec, batch_size)
        if not torch.compiler.is_compiling():
            self._check_once(call)
        return tree_unflatten(*self._run(call))

    def _run(self, call: ModuleCall) -> Outputs:
        copies = self.copies(call.trainable)
        if torch.compiler.is_compiling():
            return self._map(self, copies, call.leaves, call.spec, call.size)
        # The checks before were without gradients and in evaluation mode.
        if self._map is at_once:
            try:
                return at_once(self, copies, call.leaves, call.spec, call.size)
            except torch.OutOfMemoryError:
                raise
            except FAILURES as error:
                self._turn_to_loop(call, self._cannot_map(error))
        try:
            with buffers_kept(self.module) as have_changed:
                outputs = one_by_one(self, copies, call.leaves, call.spec, call.size)
                if have_changed():
                    # A module that keeps statistics would update them once per sample.
                    raise RuntimeError("vmap stops at buffers that its forward changes")
        except torch.OutOfMemoryError:
            raise
        except FAILURES as error:
            raise self._cannot_map(error) from error
        self._warn_once()
        return outputs

    def _warn_once(self) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        warnings.warn(
            f"{self.path}: torch.func.vmap cannot run {type(self.module).__name__}, which is "
            "therefore run one sample after the other: as exact, but slow.",
            RuntimeWarning,
            stacklevel=2,
        )

    def _run_empty(self, trainable: Mapping[str, Tensor], args: Any, kwargs: Any) -> Any:
        """vmap takes no empty batch. Sums over no copies at all keep the graph in one piece."""
        copies = self.copies(trainable)
        values = {key: p.detach() + copies[key].sum(0) for key, p in trainable.items()}
        return tree_unflatten(*self.bare.flat_call_with(values, args, kwargs))

    def _check_once(self, call: ModuleCall) -> None:
        """Once per kind of call: sample by sample the module must compute what it does in one go.

        This is what catches inputs whose first axis has the length of the batch by accident.
        """
        if not self.layout.folded:
            self._note_unbatched(call)
        signature = (call.spec, self.module.training, *map(_described, call.leaves))
        if signature in self._checked:
            return
        if self._map is at_once:
            try:
                self._check(call)
            except UnsupportedModuleError as refusal:
                if not self._finds_unbatched(call):
                    self._turn_to_loop(call, refusal)
        else:
            self._check(call)
        self._checked.add(signature)

    def _note_unbatched(self, call: ModuleCall) -> None:
        """Remember inputs whose length differs from the batch's: they never carry it."""
        for place, leaf in enumerate(call.leaves):
            if isinstance(leaf, Tensor) and leaf.dim() and len(leaf) not in (1, call.size):
                self.unbatched.add(place)

    def _finds_unbatched(self, call: ModuleCall) -> bool:
        """Whether the check passes if one input, such as positions (T,), has length B by chance."""
        for place in batched_leaves(call.leaves, call.size, self.unbatched)[1:]:
            self.unbatched.add(place)
            try:
                self._check(call)
            except UnsupportedModuleError:
                self.unbatched.discard(place)
            else:
                return True
        return False

    def _turn_to_loop(self, call: ModuleCall, refusal: UnsupportedModuleError) -> None:
        """Use the loop instead of vmap from now on, if the check passes with it.

        Otherwise `refusal` is raised. A module that changes with every call, such as one with a
        cache that grows, fails both ways.
        """
        self._map = one_by_one
        try:
            self._check(call)
        except torch.OutOfMemoryError:
            raise
        except (UnsupportedModuleError, *FAILURES):
            self._map = at_once
            raise refusal from refusal.__cause__

    def _check(self, call: ModuleCall) -> None:
        leaves, spec, size = call.leaves, call.spec, call.size
        with in_eval_mode(self.module):
            args, kwargs = tree_unflatten(leaves, spec)
            together, _ = tree_flatten(self.plain(*args, **kwargs))
            copies = {key: p.expand(size, *p.shape) for key, p in call.trainable.items()}
            try:
                if self._map is one_by_one and size > 1:
                    self.output_axes = {}
                    alone, _ = one_by_one(self, copies, leaves, spec, size)
                    self.output_axes = batch_axes(alone, together, size)
                alone, _ = self._map(self, copies, leaves, spec, size)
            except torch.OutOfMemoryError:
                raise
            except FAILURES as error:
                raise self._cannot_map(error) from error
        if not all_agree(alone, together):
            raise UnsupportedModuleError(
                self.path,
                expected="a module that treats every sample on its own",
                got="other outputs sample by sample than in one batch",
                remedy="keep the batch on axis 0 of every input, or freeze its parameters",
            )
        self._check_gradients(call)

    def _check_gradients(self, call: ModuleCall) -> None:
        """The samples' gradients must add up to the batch's: vmap passes over hooks on tensors."""
        inputs = [x.detach() if isinstance(x, Tensor) else x for x in call.leaves]
        args, kwargs = tree_unflatten(inputs, call.spec)
        copies = {k: p.detach().expand(call.size, *p.shape) for k, p in call.trainable.items()}
        at = [copy.requires_grad_() for copy in copies.values()]
        # Hooks of a checkpoint around this module would count what is saved here as its own.
        keep = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
        with in_eval_mode(self.module), torch.enable_grad(), keep, torch.random.fork_rng():
            together, _ = tree_flatten(self.plain(*args, **kwargs))
            try:
                alone, _ = self._map(self, copies, inputs, call.spec, call.size)
                singles = _gradients(alone, alone, at)
            except torch.OutOfMemoryError:
                raise
            except FAILURES as error:
                raise self._cannot_map(error) from error
            whole = _gradients(together, alone, list(call.trainable.values()))
        gaps = [one.sum(0) - other for one, other in zip(singles, whole, strict=True)]
        rounds = any(isinstance(x, Tensor) and _is_coarse(x, x) for x in alone)
        if not rounds and _length(gaps) > _TOLERANCE[torch.float32] * (1e-3 + _length(whole)):
            raise UnsupportedModuleError(
                self.path,
                expected="a module whose gradients torch.func.vmap finds",
                got="gradients of samples that do not add up to the gradient of their batch",
                remedy="use no hooks on tensors inside it, or freeze its parameters",
            )

    def _cannot_map(self, error: Exception) -> UnsupportedModuleError:
        own = [key for key, _ in self.module.named_parameters(recurse=False) if key in self.names]
        # Without these, its children would be handled one by one.
        has_children = any(True for _ in self.module.children())
        holds = has_children and not is_parametrized(self.module)
        freeze = f"freeze {', '.join(own)}" if own and holds else "freeze its parameters"
        return UnsupportedModuleError(
            self.path,
            expected="a module that torch.func.vmap can run sample by sample",
            got=f"{type(self.module).__name__}: {str(error).splitlines()[0]}",
            remedy=f"{freeze}, or build it from supported layers",
        )


def all_agree(alone: list[Any], together: list[Any]) -> bool:
    """Whether the outputs of two runs are the same up to rounding."""
    return len(alone) == len(together) and all(map(agree, alone, together))


def agree(one: Any, other: Any) -> bool:
    """Whether two outputs are the same up to rounding (of half precision, where that is used)."""
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return type(one) is type(other) and bool(one == other)
    if one.shape[1:] == other.shape[1:] and other.shape[:1] == (1,):
        other = other.expand_as(one)
    if one.shape != other.shape:
        return False
    tolerance = _HALF_TOLERANCE if _is_coarse(one, other) else _TOLERANCE.get(one.dtype, 0.0)
    other = other.to(one.dtype)
    return torch.allclose(one, other, rtol=tolerance, atol=tolerance, equal_nan=True)


def _is_coarse(one: Tensor, other: Tensor) -> bool:
    halves = {one.dtype, other.dtype} & {torch.float16, torch.bfloat16}
    return bool(halves) or torch.is_autocast_enabled(one.device.type)


def _gradients(outputs: list[Any], like: list[Any], at: list[Tensor]) -> list[Tensor]:
    """Gradients of the mean of all outputs, expanded as in `like`, with fixed odd weights."""
    total = torch.zeros((), device=at[0].device)
    for output, wide in zip(outputs, like, strict=True):
        if isinstance(output, Tensor) and output.requires_grad and not output.is_complex():
            weights = torch.arange(wide.numel(), device=wide.device).double().cos().to(wide.dtype)
            total = total + (output.expand_as(wide) * weights.view(wide.shape)).mean()
    if not total.requires_grad:
        return [torch.zeros_like(x) for x in at]
    return list(torch.autograd.grad(total, at, allow_unused=True, materialize_grads=True))


def _length(tensors: list[Tensor]) -> float:
    """The length of all together; zero where it is not finite, which tells nothing."""
    norm = torch.stack([x.double().norm() for x in tensors]).norm()
    return float(torch.nan_to_num(norm, 0.0, 0.0))


def _described(leaf: Any) -> Hashable:
    """What a check of one call says about others: the shape and type of a tensor, or the value."""
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.dtype
    return leaf if isinstance(leaf, Hashable) else type(leaf).__name__


def is_container(module: nn.Module) -> bool:
    """Whether a module only holds others' parameters and is never called itself."""
    containers = (nn.ParameterList, nn.ParameterDict, nn.ModuleList, nn.ModuleDict)
    return isinstance(module, containers)
