"""Checks on batches of the run that a shuffle leaves the model's function unchanged.

A spec is derived from the model's modules. It cannot know how the model is called: with a mask for
each head, or by calling a layer inside a block directly. So the outputs for a few samples are
compared before and after a shuffle: as a trial before the first release, at the first shuffles, and
then ever more rarely. Weights, modes and random generators are restored.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from shuffled_dpsgd.clipping.capture.batch_size import find_batch
from shuffled_dpsgd.errors import InvalidArgumentError, InvarianceError
from shuffled_dpsgd.permutation import Permutation, PermutationSpec, apply, from_groups
from shuffled_dpsgd.permutation.comparison import (
    default_tolerance,
    function_outputs,
    output_deviation,
)
from shuffled_dpsgd.runtime.attention import without_fast_attention
from shuffled_dpsgd.runtime.replay import BatchedInputs, without_a_trace
from shuffled_dpsgd.runtime.shards import Sharding
from shuffled_dpsgd.runtime.uncompiled import eagerly

_HALF_TOLERANCE = 1e-1
# At most so many entries of an output are kept: the logits of a language model are many.
_MOST_ENTRIES = 1 << 20
# So many samples are enough to see whether outputs change.
_MOST_SAMPLES = 8

# Later shuffles are compared in evaluation mode only.
_IN_BOTH_MODES = 3

Outputs = tuple[torch.Tensor, ...]


class ShuffleCheck:
    """Compares outputs before and after shuffles of `model` by `spec`.

    The model is run in evaluation mode, and also in training mode if nothing is random there.
    Dropout masks do not move with the weights, so outputs under dropout cannot be compared. The
    weights of a sharded model are gathered as needed; each rank uses its own inputs.
    """

    def __init__(
        self, model: nn.Module, spec: PermutationSpec, sharding: Sharding | None = None
    ) -> None:
        self._sharding = sharding
        self.num_verified = 0
        self._model = model
        self._spec = spec
        self._num_shuffles = 0
        self._was_tried = False
        self._is_noted = False
        self._inputs: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self._autocast: torch.dtype | None = None
        self._needs_autocast: bool | None = None
        self._takes_few = True
        self._repeats_in_training: bool | None = None

    def listen(self) -> RemovableHandle:
        """Record what the model is called with, until the handle is removed."""
        return self._model.register_forward_pre_hook(self._note, with_kwargs=True)

    def forget(self) -> None:
        """The batch is over: record the inputs of the next one."""
        self._is_noted = False
        if not self._is_due():
            self._inputs = None

    def try_out(self) -> None:
        """At the first batch, move every group there and back; refuse one that changes outputs."""
        if self._was_tried or self._inputs is None:
            return
        self._was_tried = True
        groups = range(len(self._spec.groups))
        with self._probing() as tolerance:
            before = self._outputs()
            deviation = self._deviation(groups, before)
            if self._is_any(not deviation <= tolerance):
                raise _changed(self._culprit(groups, before, tolerance), deviation, tolerance)
        self.num_verified += 1

    @contextmanager
    def watching(
        self, permutation: Permutation, optimizer: torch.optim.Optimizer
    ) -> Iterator[None]:
        """Around a move, compare outputs if it is due; if they differ, undo the move and raise."""
        due = self._inputs is not None and self._is_due()
        self._num_shuffles += 1
        if not due:
            yield
            return
        with self._probing():
            before = self._outputs()
        yield
        with self._probing() as tolerance:
            deviation = _worst(before, self._outputs())
        if self._is_any(not deviation <= tolerance):
            apply(permutation.inverse(), self._model, optimizer)
            raise _changed("all groups together", deviation, tolerance)
        self.num_verified += 1

    def _is_any(self, flag: bool) -> bool:
        return flag if self._sharding is None else self._sharding.is_any(flag)

    def _is_due(self) -> bool:
        """At shuffles 0, 1, 2, 4, 8 and so on."""
        return self._num_shuffles & (self._num_shuffles - 1) == 0

    def _note(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        # While compiling, conditions that change between calls would cause recompilation.
        compiling = torch.compiler.is_compiling()
        if compiling or (torch.is_grad_enabled() and not self._is_noted and self._is_due()):
            device = next(self._model.parameters()).device.type
            enabled = torch.is_autocast_enabled(device)
            self._autocast = torch.get_autocast_dtype(device) if enabled else None
            self._inputs = (args, kwargs)
            if not compiling:
                self._is_noted = True

    def _culprit(self, groups: range, before: list[Outputs], tolerance: float) -> str:
        """The first group that changes the outputs by itself."""
        for index in groups:
            alone = self._deviation(range(index, index + 1), before)
            if self._is_any(not alone <= tolerance):
                return self._spec.groups[index].name
        return "all groups together"

    def _rolled(self, moving: range) -> Permutation:
        """Roll the moving groups by one place, so that every slot moves; leave the others."""
        device = next(self._model.parameters()).device
        return from_groups(
            self._spec,
            [
                torch.arange(group.size, device=device).roll(int(index in moving))
                for index, group in enumerate(self._spec.groups)
            ],
        )

    def _deviation(self, moving: range, before: list[Outputs]) -> float:
        permutation = self._rolled(moving)
        apply(permutation, self._model)
        try:
            return _worst(before, self._outputs())
        finally:
            apply(permutation.inverse(), self._model)

    def _outputs(self) -> list[Outputs]:
        """Outputs in evaluation mode, and at first also in training mode if nothing is random."""
        with self._unsharded():
            modes = {module: module.training for module in self._model.modules()}
            self._model.eval()
            found = [self._call(seed=0)]
            for module, training in modes.items():
                module.training = training
            early = self._num_shuffles <= _IN_BOTH_MODES
            if early and any(modes.values()) and self._repeats_in_training is not False:
                found.append(self._call(seed=0))
                if self._repeats_in_training is None:
                    again = self._call(seed=1)
                    self._repeats_in_training = _worst(found[1:], [again]) == 0.0
            return found if self._repeats_in_training else found[:1]

    def _call(self, seed: int) -> Outputs:
        device = next(self._model.parameters()).device.type
        with torch.autocast(device, dtype=self._autocast, enabled=self._needs_autocast is True):
            output = self._forward(seed)
        found = tuple(_some_entries(tensor) for tensor in function_outputs(output))
        if not found:
            raise InvarianceError(
                f"{type(self._model).__name__} returns no floating-point tensors that could be "
                "compared before and after a shuffle; return tensors, a dictionary, a sequence or "
                "a dataclass of them, or use shuffle='off'"
            )
        return found

    def _forward(self, seed: int) -> Any:
        """The outputs for a few samples, or for all if the model takes no smaller batch."""
        assert self._inputs is not None
        args, kwargs = self._inputs
        torch.manual_seed(seed)
        if self._takes_few:
            try:
                size = len(find_batch(args, kwargs))
                if size > _MOST_SAMPLES:
                    few, some = BatchedInputs().take(args, kwargs, size, range(_MOST_SAMPLES))
                    return self._model(*few, **some)
            except (InvalidArgumentError, RuntimeError, ValueError, IndexError):
                # If the model itself is at fault, the call below raises again.
                self._takes_few = False
                torch.manual_seed(seed)
        return self._model(*args, **kwargs)

    @contextmanager
    def _probing(self) -> Iterator[float]:
        """Run the model without gradients or fast paths, restore it, and yield the tolerance."""
        with (
            torch.no_grad(),
            without_a_trace(self._model),
            without_fast_attention(),
            eagerly(),
            warnings.catch_warnings(action="ignore"),
        ):
            if self._needs_autocast is None:
                with self._unsharded():
                    self._needs_autocast = self._cannot_do_without_autocast()
            least = _HALF_TOLERANCE if self._needs_autocast else 0.0
            dtypes = () if self._sharding is None else self._sharding.computed_in
            yield max(default_tolerance(self._model, dtypes), least)

    def _unsharded(self) -> AbstractContextManager[None]:
        return nullcontext() if self._sharding is None else self._sharding.unsharded()

    def _cannot_do_without_autocast(self) -> bool:
        """Rounding is smaller without autocast, but some kernels take half precision only."""
        if self._autocast is None:
            return False
        self._needs_autocast = False
        try:
            self._call(seed=0)
        except RuntimeError:
            return True
        return False


def _worst(before: list[Outputs], after: list[Outputs]) -> float:
    return max(output_deviation(b, a) for b, a in zip(before, after, strict=True))


def _some_entries(tensor: torch.Tensor) -> torch.Tensor:
    """All entries of a small tensor; of a large one every n-th, with n odd."""
    every = tensor.numel() // _MOST_ENTRIES
    return tensor.detach() if every < 2 else tensor.detach().flatten()[:: every | 1].clone()


def _changed(group: str, deviation: float, tolerance: float) -> InvarianceError:
    return InvarianceError(
        f"{group}: permuting changed the model's outputs by {deviation:.2e}, expected at most "
        f"{tolerance:.0e}. The model is not called as its parts allow (a mask or weights per head, "
        "a layer inside a block called from outside), or is random in evaluation mode: use "
        "scope='paper' or shuffle='off', or change the call"
    )
