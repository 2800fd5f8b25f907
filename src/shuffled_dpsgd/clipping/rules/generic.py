"""The exact rule for any module: run it once per sample, with per-sample copies of its parameters.

The copies are views, so they cost no memory; their gradients are the per-sample gradients. The
module and everything inside it run under `torch.func.vmap`, one sample at a time.

Shapes: B samples, S any parameter shape.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.parametrize import is_parametrized
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from shuffled_dpsgd.clipping.captures import Contribution, DenseGrad
from shuffled_dpsgd.clipping.rules.base import Saved, Slot, batch_of, recorder_of, unfolded
from shuffled_dpsgd.clipping.rules.embedding import OwnLookups
from shuffled_dpsgd.clipping.rules.gradient_sums import add_up, as_it_is, gradients
from shuffled_dpsgd.errors import UnsupportedModuleError

if TYPE_CHECKING:
    from shuffled_dpsgd.clipping.batch import Batch

_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3}
_HALF_TOLERANCE = 5e-2
# What vmap can run and differentiate everywhere: on a CPU the flash kernel gives masks no gradient.
_MAPPED_ATTENTION = [
    SDPBackend.MATH,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
]
# Outputs that are the same for every sample, and need no vmap.
_CONSTANTS = (bool, float, int, str, type(None))
# Ways in which a module fails that cannot be run one sample at a time.
FAILURES = (RuntimeError, ValueError, IndexError, TypeError)


class CopiesFunction(torch.autograd.Function):
    """One copy of a parameter per sample; the backward records the copies' gradients."""

    @staticmethod
    def forward(
        ctx: Any, parameter: Tensor, part: int, slot: CopiesSlot, batch: Batch, *taps: Tensor
    ) -> Tensor:
        ctx.part, ctx.slot, ctx.batch = part, slot, batch
        return parameter.expand(batch.size, *parameter.shape)

    @staticmethod
    def backward(ctx: Any, grads_BS: Tensor) -> Any:
        part = ctx.part
        taps = recorder_of(ctx.slot).record(ctx.batch, ctx.slot, (part, grads_BS), part)
        return None, None, None, None, *taps


class CopiesSlot(Slot):
    """A slot whose entries are (which of its parameters, per-sample gradients)."""

    def __init__(self, **site: Any) -> None:
        super().__init__(**site)
        self.keys = list(self.names)
        self.bare = Bare(self)

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
            taps = recorder_of(self).taps_of(batch, self, part)
            found[key] = CopiesFunction.apply(parameter, part, self, batch, *taps)
        return found

    def restore(self, part: int, tensors: list[Tensor]) -> Saved:
        return (part, tensors[0])

    def contributions(self, saved: Saved) -> Iterator[tuple[str, Contribution]]:
        part, grads_BS = saved
        yield self.names[self.keys[part]], DenseGrad(grads_BS=grads_BS)


class Bare(nn.Module):
    """A module's own forward, without its hooks and without a slot's replacement."""

    def __init__(self, slot: Slot) -> None:
        super().__init__()
        self.inner = slot.module
        self.own_forward = slot.plain

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.own_forward(*args, **kwargs)

    def flat_call_with(
        self, own: dict[str, Tensor], args: Any, kwargs: Any
    ) -> tuple[list[Any], TreeSpec]:
        """Flat outputs and their structure, with some of the module's parameters replaced."""
        replaced = {f"inner.{key}": value for key, value in own.items()}
        return tree_flatten(functional_call(self, replaced, args, kwargs))


def batched_leaves(leaves: list[Any], length: int) -> list[int]:
    """Positions of the tensors whose first axis has the length of the batch."""
    axes = [x.shape[:1] if isinstance(x, Tensor) else () for x in leaves]
    return [i for i, axis in enumerate(axes) if axis == (length,)]


def rows_of_a_sample(slot: Slot, leaves: list[Any], size: int) -> int:
    """How many rows of the first tensor belong to each sample: one, unless the input is folded."""
    if not slot.folded:
        return 1
    length = next(len(x) for x in leaves if isinstance(x, Tensor) and x.dim())
    if length % size != 0:
        raise slot.refuse_batch_axis(size, torch.Size([length]))
    return length // size


def sample_by_sample(
    slot: CopiesSlot,
    copies: dict[str, Tensor],
    leaves: list[Any],
    spec: TreeSpec,
    size: int,
) -> tuple[list[Any], TreeSpec]:
    """The module under vmap over per-sample parameters and the inputs that have a batch axis."""
    bare = slot.bare
    rows = rows_of_a_sample(slot, leaves, size)
    mapped = batched_leaves(leaves, rows * size)
    found: list[Any] = []
    out_spec: TreeSpec | None = None

    def one_sample(own: dict[str, Tensor], *inputs: Tensor) -> tuple[Tensor, ...]:
        nonlocal found, out_spec
        filled = list(leaves)
        for position, value in zip(mapped, inputs, strict=True):
            filled[position] = value
        args, kwargs = tree_unflatten(filled, spec)
        found, out_spec = bare.flat_call_with(own, args, kwargs)
        return tuple(_rows(slot, x, rows) for x in found if not isinstance(x, _CONSTANTS))

    attention = nullcontext() if torch.compiler.is_compiling() else sdpa_kernel(_MAPPED_ATTENTION)
    with attention, OwnLookups():
        inputs = [unfolded(leaves[i], size) for i in mapped]
        outputs = vmap(one_sample, randomness="different")(copies, *inputs)
    assert out_spec is not None
    tensors = iter([output.flatten(0, 1) for output in outputs])
    return [x if isinstance(x, _CONSTANTS) else next(tensors) for x in found], out_spec


def _rows(slot: CopiesSlot, output: Any, rows: int) -> Tensor:
    """A sample's rows of an output: as many as of the input, or what a comparison has agreed to.

    A router may be given (B, T, D) and return (B T, E).
    """
    fits = isinstance(output, Tensor) and output.dim() > 0
    if not fits or (output.shape[0] != rows and not slot.is_compared):
        raise UnsupportedModuleError(
            slot.path,
            expected="outputs with the batch on axis 0",
            got=tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__,
            remedy="give the module outputs per sample, or freeze its parameters",
        )
    return cast(Tensor, output)


@contextmanager
def in_eval_mode(module: nn.Module) -> Iterator[None]:
    """Run without gradients, dropout or warnings; every training flag is put back.

    For checks beforehand: the forward proper follows and will give any warning there is to give.
    """
    modes = [(child, child.training) for child in module.modules()]
    module.eval()
    try:
        with torch.no_grad(), without_fast_attention(), warnings.catch_warnings(action="ignore"):
            yield
    finally:
        for child, mode in modes:
            child.training = mode


@contextmanager
def without_fast_attention() -> Iterator[None]:
    """Have PyTorch's encoders call their layers, as in training, also where nothing is trained.

    Their shortcut for inference packs a padded batch into a nested tensor, which has no shape.
    """
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


class GenericSlot(CopiesSlot):
    """Any module whose samples do not interact; its children have no slots of their own."""

    kind = "generic"
    may_fold = True

    def __init__(self, **site: Any) -> None:
        super().__init__(**site)
        self._checked: set[tuple[torch.Size, ...]] = set()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.plain(*args, **kwargs)
        batch_size = (self.recorder.batch or self.recorder.recomputed_batch(self.path)).size
        leaves, spec = tree_flatten((args, kwargs))
        trainable = {k: p for k, p in self.module.named_parameters() if k in self.names}
        if batch_size == 0:
            return self._run_empty(trainable, args, kwargs)
        if torch.compiler.is_compiling():
            mapped = sample_by_sample(self, self.copies(trainable), leaves, spec, batch_size)
            return tree_unflatten(*mapped)
        signature = tuple(leaf.shape for leaf in leaves if isinstance(leaf, Tensor))
        if signature not in self._checked:
            self._check(trainable, leaves, spec, batch_size)
            self._checked.add(signature)
        try:
            mapped = sample_by_sample(self, self.copies(trainable), leaves, spec, batch_size)
        except torch.OutOfMemoryError:
            raise
        except FAILURES as error:
            # The check before was without gradients and in evaluation mode.
            raise self._cannot_map(error) from error
        return tree_unflatten(*mapped)

    @property
    def is_compared(self) -> bool:
        return bool(self._checked) or super().is_compared

    def folded_forward(self) -> Callable[..., Any]:
        return self.forward

    def _run_empty(self, trainable: Mapping[str, Tensor], args: Any, kwargs: Any) -> Any:
        """vmap takes no empty batch. Sums over no copies at all keep the graph in one piece."""
        copies = self.copies(trainable)
        values = {key: p.detach() + copies[key].sum(0) for key, p in trainable.items()}
        return tree_unflatten(*self.bare.flat_call_with(values, args, kwargs))

    def _check(
        self, trainable: Mapping[str, Tensor], leaves: list[Any], spec: TreeSpec, size: int
    ) -> None:
        """Once per input shape: sample by sample the module must compute what it does in one go.

        This is what catches inputs whose first axis has the length of the batch by accident.
        """
        with in_eval_mode(self.module):
            args, kwargs = tree_unflatten(leaves, spec)
            together, _ = tree_flatten(self.plain(*args, **kwargs))
            copies = {key: p.expand(size, *p.shape) for key, p in trainable.items()}
            try:
                alone, _ = sample_by_sample(self, copies, leaves, spec, size)
            except FAILURES as error:
                raise self._cannot_map(error) from error
        if not all_agree(alone, together):
            raise UnsupportedModuleError(
                self.path,
                expected="a module that treats every sample on its own",
                got="other outputs sample by sample than in one batch",
                remedy="keep the batch on axis 0 of every input, or freeze its parameters",
            )
        self._check_gradients(trainable, leaves, spec, size)

    def _check_gradients(
        self, trainable: Mapping[str, Tensor], leaves: list[Any], spec: TreeSpec, size: int
    ) -> None:
        """The samples' gradients must add up to the batch's: vmap passes over hooks on tensors."""
        inputs = [x.detach() if isinstance(x, Tensor) else x for x in leaves]
        args, kwargs = tree_unflatten(inputs, spec)
        # Hooks of a checkpoint around this module would count what is saved here as its own.
        with (
            in_eval_mode(self.module),
            torch.enable_grad(),
            torch.autograd.graph.saved_tensors_hooks(as_it_is, as_it_is),
            torch.random.fork_rng(),
        ):
            together, _ = tree_flatten(self.plain(*args, **kwargs))
            copies = {k: p.detach().expand(size, *p.shape) for k, p in trainable.items()}
            for copy in copies.values():
                copy.requires_grad_()
            try:
                alone, _ = sample_by_sample(self, copies, inputs, spec, size)
                singles = gradients(alone, alone, list(copies.values()))
            except FAILURES as error:
                raise self._cannot_map(error) from error
            whole = gradients(together, alone, list(trainable.values()))
        if not add_up(singles, whole, alone):
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
    if one.shape != other.shape:
        other = other.expand_as(one) if other.dim() == one.dim() and other.shape[0] == 1 else other
    if one.shape != other.shape:
        return False
    halves = {one.dtype, other.dtype} & {torch.float16, torch.bfloat16}
    coarse = bool(halves) or torch.is_autocast_enabled(one.device.type)
    tolerance = _HALF_TOLERANCE if coarse else _TOLERANCE.get(one.dtype, 0.0)
    other = other.to(one.dtype)
    return torch.allclose(one, other, rtol=tolerance, atol=tolerance, equal_nan=True)


def is_container(module: nn.Module) -> bool:
    """Whether a module only holds others' parameters and is never called itself."""
    containers = (nn.ParameterList, nn.ParameterDict, nn.ModuleList, nn.ModuleDict)
    return isinstance(module, containers)
