"""What every layer rule shares: a slot stands for one module of the model under an engine.

While the engine is active the slot's `forward` replaces the module's. It runs the same operation,
but the backward computes the gradient of the input only, and records the input with the gradient of
the output. The parameter's own gradient is never formed.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from shuffled_dpsgd.clipping.capture.captures import Capture, InputAndGradient
from shuffled_dpsgd.clipping.capture.operator import find_sink
from shuffled_dpsgd.clipping.contributions import cost
from shuffled_dpsgd.clipping.contributions.kinds import Contribution
from shuffled_dpsgd.errors import UnsupportedModuleError

if TYPE_CHECKING:
    from shuffled_dpsgd.clipping.capture.batch import CapturedBatch
    from shuffled_dpsgd.clipping.capture.recorder import CaptureRecorder

# Stands for the number of rows a sample has where there is one row that all samples share.
ONE_FOR_ALL = -1


def can_listen() -> bool:
    """Whether a layer may keep its input by itself instead of saving it through autograd.

    Not while a compiler traces, and not under saved-tensor hooks (activation checkpointing,
    off-loading), which want to see everything that is kept.
    """
    return (
        not torch.compiler.is_compiling()
        and torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    )


def no_view(out: Tensor) -> Tensor:
    """`out` as no view: autograd forbids in-place changes of views that functions return."""
    if torch.compiler.is_compiling() or not out._is_view():
        return out
    return cast(Tensor, torch.ops.aten._unsafe_view(out, out.shape))


def unfolded(x: Tensor, size: int) -> Tensor:
    """Folded rows with the batch on an axis of its own; tracers do not know `Tensor.unflatten`."""
    return x.reshape(size, len(x) // size, *x.shape[1:])


@dataclass(slots=True, eq=False)
class InputLayout:
    """Where a slot's inputs have the batch, as the check of the batch axis found; it alone writes.

    They are `folded` if batch and positions are one axis, (B K, ...), with the rows of a sample
    side by side; `rows` then says how many a sample has in each call. They are `shared_by_batch` if
    they have no batch axis at all: ids of a table that every sample looks up.
    """

    folded: bool = False
    shared_by_batch: bool = False
    rows: tuple[int, ...] | None = None


class Slot:
    """One module whose trainable parameters a rule handles.

    `names` maps the module's own name of each trainable parameter to its name in the model (one
    name per tensor, so that tied parameters meet).
    """

    kind = "generic"
    takes_children = True
    batch_axis = 0
    # How norms are found where the cost rule is not asked.
    fixed_backend: str | None = "stored"
    # Whether it can tell the samples of a folded input apart; see `folded`.
    may_fold = False
    # Whether its rule may run the whole module more often than the model's forward does.
    runs_module = False

    def __init__(
        self,
        *,
        index: int,
        path: str,
        module: nn.Module,
        names: dict[str, str],
        recorder: CaptureRecorder,
    ) -> None:
        self.index = index
        self.path = path
        self.module = module
        self.names = names
        self.weight_name = names.get("weight")
        self.bias_name = names.get("bias")
        self.recorder = recorder
        self.handle = recorder.handle
        self.parameters = module._parameters
        self.plain = module.forward
        # Its group, and whether a parameter of that is used in several places; the group says so.
        self.group, self.is_shared = index, False
        self.layout = InputLayout()
        # The cost rule: how norms are found, by the shape of a call.
        self.choose: cost.Chooser = cost.cheapest
        self.last_shape: tuple[int, int, int] | None = None
        self.last_device = "cpu"

    @property
    def folded(self) -> bool:
        """Whether inputs have the batch and the positions on one axis; see `InputLayout`."""
        return self.layout.folded

    @property
    def shared_by_batch(self) -> bool:
        """Whether inputs have no batch axis; see `InputLayout`."""
        return self.layout.shared_by_batch

    def __getstate__(self) -> dict[str, Any]:
        """Refuse copies and pickles of a model with an active engine, which would be copied too.

        The parameters of the copy would never get gradients, without any error.
        """
        if "forward" in self.module.__dict__:
            raise UnsupportedModuleError(
                self.path,
                expected="models to be copied and pickled outside `with engine:`",
                got="a module whose forward is replaced for the time being",
                remedy="copy model.state_dict(), or leave the `with` block first",
            )
        return vars(self)

    @classmethod
    def accepts(cls, module: nn.Module) -> bool:
        """Whether the rule covers this instance of a type it is registered for."""
        return "weight" in module._parameters

    @abstractmethod
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward, under its names of arguments, with book-keeping in its backward."""

    @abstractmethod
    def contributions(self, capture: Capture) -> Iterable[tuple[str, Contribution]]:
        """What one call contributes to each parameter, by model name."""

    def heard(self, size: int, x: Tensor | None, g: Tensor) -> Capture:
        """The capture of an input and an output gradient that were listened for."""
        return InputAndGradient(x, g)

    def captured(self, part: int, tensors: Sequence[Tensor]) -> Capture:
        """The capture of the tensors that `CaptureRecorder.record` was given, None left out."""
        return InputAndGradient(tensors[0], tensors[1])

    def refuse_batch_axis(self, size: int, shape: torch.Size) -> UnsupportedModuleError:
        """The error for an input whose first axis is neither the batch nor broadcast over it."""
        return UnsupportedModuleError(
            self.path,
            expected=f"an input whose first axis is the batch of {size} samples",
            got=f"shape {tuple(shape)}",
            remedy="keep the batch on axis 0, or freeze this module with requires_grad_(False); if "
            "it is folded into another axis, run one batch without torch.compile first",
        )

    def refuse_length(self, length: int, samples: int) -> UnsupportedModuleError:
        """The error for an input whose first axis does not grow with the batch as it should."""
        return UnsupportedModuleError(
            self.path,
            expected="an input whose first axis is the batch",
            got=f"an axis of length {length} in a trial with {samples} samples",
            remedy="keep the batch on axis 0 (batch_first=True), or freeze this module with "
            "requires_grad_(False)",
        )

    def folded_forward(self) -> Callable[..., Any]:
        """`forward` for folded inputs: gives the batch an axis of its own, and folds it again."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return self.plain(*args, **kwargs)
            (x,) = (*args, *kwargs.values())
            recorder = recorder_of(self)
            batch = recorder.batch if recorder.batch is not None else recorder.latest
            if recorder.batch is not None and not torch.compiler.is_compiling():
                self.refuse_other_rows(recorder.batch, len(x))
            size = 0 if batch is None else size_of(batch)
            if batch is not None and len(x) == 1 < batch.rows_per_sample:
                x = x.expand(size * batch.rows_per_sample, *x.shape[1:])
            if batch is None or len(x) in (1, size):
                return self.forward(x)
            if size == 0 or len(x) % size != 0:
                raise self.refuse_batch_axis(size, x.shape)
            return no_view(self.forward(unfolded(x, size)).flatten(0, 1))

        return forward

    def refuse_other_rows(self, batch: CapturedBatch, length: int) -> None:
        """Refuse a folded input unless each sample has as many rows as in the check.

        A router that sends only some tokens here may happen to send as many as there are samples.
        """
        known = self.layout.rows
        if known is None:
            return
        call = batch.calls[self.index]
        rows = known[call] if call < len(known) else 0
        if length != (1 if rows == ONE_FOR_ALL else rows * batch.size):
            raise UnsupportedModuleError(
                self.path,
                expected=f"{rows} rows of each of {batch.size} samples, as when it was checked",
                got=f"{length} rows",
                remedy="send all tokens of all samples through it, as `batched_mm` mixtures of "
                "experts do, or freeze it with requires_grad_(False)",
            )

    def over_batch(self, tensor: Tensor, size: int) -> Tensor:
        """`tensor` with the batch on its first axis: as it is, or expanded from length one.

        An input of length one is used by every sample. Expanded before the layer, it keeps the
        samples' gradients apart; expanded after it, they would already be summed.
        """
        if tensor.shape[0] == size:
            return tensor
        if tensor.shape[0] == 1:
            return tensor.expand(size, *tensor.shape[1:])
        if torch.compiler.is_compiling():
            # Tracers cannot follow how an exception class of our own is made.
            raise ValueError(f"{self.path}: run one batch without torch.compile first")
        raise self.refuse_batch_axis(size, tensor.shape)


def recorder_of(slot: Slot) -> CaptureRecorder:
    """The recorder of a slot; in a traced forward it is found by its handle.

    As an attribute of the slot it would be guarded: the compiled model would check before each
    run, slot by slot and in Python, that it is still the same object.
    """
    if torch.compiler.is_compiling():
        return cast("CaptureRecorder", find_sink(slot.handle))
    return slot.recorder


def batch_of(slot: Slot) -> CapturedBatch:
    """The batch that a call of a slot belongs to; counts the call unless it is a recomputation.

    A function and not a method, like all that every traced forward calls. For a method the compiled
    model would check before each run, slot by slot, that no attribute of the instance hides it.
    """
    recorder = recorder_of(slot)
    batch = recorder.batch
    if batch is None:
        return recorder.recomputed_batch(slot.path)
    batch.calls[slot.index] += 1
    return batch


def enter(slot: Slot) -> tuple[CapturedBatch, bool, CaptureRecorder]:
    """The batch of a call, as `batch_of`; whether the slot `can_listen`; and its recorder."""
    return batch_of(slot), can_listen(), recorder_of(slot)


def size_of(batch: CapturedBatch) -> int:
    """The batch size that a slot's forward compares its input with.

    A compiler that traces a layer alone takes a number from outside for a constant, and compiles
    the layer anew for every size. The length of a tensor it takes for a variable.
    """
    input_B = batch.input_B
    if input_B is None or not torch.compiler.is_compiling():
        return batch.size
    return input_B.shape[0]
