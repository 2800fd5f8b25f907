"""When each check of a batch runs: before its forward, after it, with its losses, and at the end.

The checks themselves are in `checks/`. Here is their order, and how they borrow the model.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from shuffled_dpsgd.clipping.attachment import Attachment
from shuffled_dpsgd.clipping.capture.batch import CapturedBatch
from shuffled_dpsgd.clipping.capture.batch_size import find_batch
from shuffled_dpsgd.clipping.capture.output_tensors import tensors_in, with_tensors
from shuffled_dpsgd.clipping.capture.recorder import CaptureRecorder
from shuffled_dpsgd.clipping.capture.samples import BatchKinds
from shuffled_dpsgd.clipping.capture.slot import Slot
from shuffled_dpsgd.clipping.checks.batch_axis import BatchAxisCheck
from shuffled_dpsgd.clipping.checks.loss_independence import LossCheck
from shuffled_dpsgd.clipping.checks.random_states import randomness_kept
from shuffled_dpsgd.clipping.checks.solo_runs import Autocast, without_a_trace
from shuffled_dpsgd.clipping.checks.standing import StandingCheck
from shuffled_dpsgd.clipping.checks.watch import tap_output
from shuffled_dpsgd.errors import UnsupportedModuleError
from shuffled_dpsgd.runtime.clock import Clock
from shuffled_dpsgd.runtime.shards import Sharding
from shuffled_dpsgd.runtime.uncompiled import eagerly


class BatchChecks:
    """The checks of the batch axis, of the losses and of single samples, for one engine.

    While a check runs the model, `is_running` is set: the engine's hooks then do nothing. `trial`
    is the batch, if any, that is booked for the standing check alone. With `numbers_are_means`, a
    single number among the outputs is the mean of the samples' losses.

    With a `sharding`, all ranks lend each other weights for the checks of a batch that any of them
    checks, so that each can run the model as often as its checks ask. A batch without samples that
    count (`has_samples`) is not compared with single ones.
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        slots: Sequence[Slot],
        parameters: Mapping[str, nn.Parameter],
        recorder: CaptureRecorder,
        attachment: Attachment,
        rate: float,
        numbers_are_means: bool,
        sharding: Sharding | None = None,
    ) -> None:
        self.clock = Clock()
        self.is_running = False
        self.has_samples = True
        self._sharding = sharding
        # Whether some rank compares samples of the latest batch with single ones.
        self._owes_lending = False
        self.trial: CapturedBatch | None = None
        self.axis = BatchAxisCheck(model, slots)
        self._model = model
        self._slots = slots
        self._recorder = recorder
        self._attachment = attachment
        self._numbers_are_means = numbers_are_means
        self._kinds = BatchKinds(model)
        self._losses = LossCheck(None if sharding is not None else parameters)
        self.standing = StandingCheck(
            model=model,
            slots=slots,
            parameters=parameters,
            rate=rate,
            numbers_are_means=numbers_are_means,
            inputs=self._kinds.inputs,
            detached=self.taken_off,
            attached=self._put_on_trial,
            sharding=sharding,
        )
        self._compiled_call: tuple[tuple[Any, Any], int, int, Autocast, bool] | None = None
        self._forward_hook: RemovableHandle | None = None

    def before_forward(self, args: Any, kwargs: Any, size: int, device: str) -> bool:
        """Check the batch axis of a call of the model; returns whether to watch its forward."""
        kind = self._kinds.of(args, kwargs, size, device)
        checks_axis = self.axis.is_due(args, kwargs, size, kind)
        watches = self.has_samples and self.standing.turns.is_due(size, kind)
        with self._lending_before(checks_axis or watches):
            if checks_axis:
                self._check_axis(args, kwargs, size, kind)
        self.axis.expect(args, kwargs, size, kind)
        return watches

    def watch_forward(self, batch: CapturedBatch, args: Any, kwargs: Any) -> None:
        """Keep what the forward that begins needs to be repeated; it runs without a compiler.

        Compiled blocks would draw other random numbers than the blocks themselves.
        """
        self.standing.begin(batch, (args, kwargs), batch.size, batch.device)
        self.detach()
        compilers = ExitStack()
        compilers.enter_context(eagerly())
        self._forward_hook = self._model.register_forward_hook(
            lambda *_: compilers.close(), always_call=True
        )

    def after_forward(self, batch: CapturedBatch, args: Any, kwargs: Any, output: Any) -> Any:
        """The outputs that the caller must get instead, or None if they stay as they are."""
        tapped = None
        watch = self.standing.watch
        is_watched = watch is not None and watch.batch is batch
        if watch is not None and is_watched:
            output = tap_output(watch, output, lambda: self._recorder.muted)
            tapped = output
        if is_watched or not self._losses.done:
            if self._sharding is not None and not is_watched:
                # FSDP gathers weights when a gradient arrives at the outputs that it has seen.
                tapped = output = with_tensors(output, _views(output))
            self._losses.note(output, batch.size)
        return tapped

    def check_losses(self, batch: CapturedBatch, losses: Tensor) -> None:
        """Follow the losses back to the outputs: the first losses, and those of watched samples."""
        samples = self.standing.samples_of(batch)
        if samples or not self._losses.done:
            self._recorder.muted = True
            try:
                self._losses.run(losses, samples)
            finally:
                self._recorder.muted = False

    def check_late(self, batch: CapturedBatch) -> None:
        """Check what a compiled forward could not, before anything of its batch is handed out."""
        if batch.compiled.inputs is None:
            return
        args, kwargs, dtype = batch.compiled.inputs
        kind = self._kinds.of(args, kwargs, batch.size, batch.device)
        if self.axis.is_due(args, kwargs, batch.size, kind):
            with torch.autocast(batch.device, dtype=dtype, enabled=dtype is not None):
                self._check_axis(args, kwargs, batch.size, kind, late=True)
        if self.standing.turns.is_due(batch.size, kind):
            lower = dtype or torch.get_autocast_dtype(batch.device)
            cast = Autocast(device=batch.device, enabled=dtype is not None, dtype=lower)
            self._compiled_call = (args, kwargs), batch.size, batch.counted, cast, batch.has_losses

    def settle(self) -> None:
        """Finish the standing check of the latest batch, before anything of it is handed out.

        Raises:
            UnsupportedModuleError: what was booked for a sample is not its gradient.
        """
        call, self._compiled_call = self._compiled_call, None
        owes, self._owes_lending = self._owes_lending, False
        if call is None and not self.standing.is_pending and not owes:
            return
        lending = nullcontext() if self._sharding is None or not owes else self._sharding.lending()
        with self.clock.part("checks"), lending:
            self.standing.settle()
            if call is not None:
                self.standing.try_batch(*call)

    def _lending_before(self, checks: bool) -> AbstractContextManager[None]:
        """Around what a rank checks before a forward; collective where the model is sharded."""
        if self._sharding is None:
            return nullcontext()
        self._owes_lending = self._sharding.is_any(checks)
        return self._sharding.lending() if self._owes_lending else nullcontext()

    def forget(self) -> None:
        """Drop what has not been compared yet."""
        self.standing.forget()
        self._compiled_call = None

    def detach(self) -> None:
        """Leave no hook on the model."""
        if self._forward_hook is not None:
            self._forward_hook.remove()
            self._forward_hook = None

    def _check_axis(
        self, args: Any, kwargs: Any, size: int, kind: Hashable, late: bool = False
    ) -> None:
        folded = [slot.folded for slot in self._slots]
        # Compiled blocks would be compiled with the check's hooks, as often as the compiler may.
        with self.clock.part("checks"), eagerly():
            self.axis.run(args, kwargs, size, kind, late)
        self._recorder.axis_checked = True
        if [slot.folded for slot in self._slots] != folded:
            # Only then: replaced forwards make a compiled model compile again.
            self._attachment.renew()
        if self.axis.shared:
            self._try_shared(args, kwargs, size)

    def _try_shared(self, args: Any, kwargs: Any, size: int) -> None:
        """Run the model as it is going to run: what is shared gets a row for every sample.

        Raises:
            UnsupportedModuleError: the model cannot use what it computes once for all so.
        """
        device = find_batch(args, kwargs).device
        batch = CapturedBatch(size=size, device=device.type, slots=len(self._slots), scale=1.0)
        with randomness_kept(self._model, device), without_a_trace(self._model):
            try:
                with self._put_on_trial(batch), torch.enable_grad():
                    self._model(*args, **kwargs)
            except (RuntimeError, ValueError, IndexError) as error:
                raise UnsupportedModuleError(
                    self.axis.shared[0].path,
                    expected="a layer without batch axis whose outputs are only broadcast over the "
                    "samples",
                    got=f"{type(error).__name__}: {str(error).splitlines()[0]}",
                    remedy="add its outputs to the samples' as they are, or expand its input over "
                    "the batch before the layer; or freeze it with requires_grad_(False)",
                ) from error

    @contextmanager
    def taken_off(self) -> Iterator[None]:
        """Run the model as its owner wrote it."""
        self.is_running = True
        try:
            with self._attachment.lifted(), eagerly():
                yield
        finally:
            self.is_running = False

    def _graph_on_loan(self) -> AbstractContextManager[None]:
        """A forward and backward whose gradients go to the book-keeping, not to parameters."""
        if self._sharding is None:
            return nullcontext()
        return self._sharding.gradients_to(lambda name, grad: None)

    @contextmanager
    def _put_on_trial(self, batch: CapturedBatch) -> Iterator[Callable[[], None]]:
        """Run the model with book-keeping for the standing check alone."""
        latest = self._recorder.latest
        self.is_running, self.trial = True, batch
        self._recorder.open(batch)
        try:
            with self._attachment.lent(), eagerly(), self._graph_on_loan():
                yield self._recorder.close_forward
        finally:
            self._recorder.close_forward()
            self._recorder.latest = latest
            self.is_running, self.trial = False, None


def _views(output: Any) -> dict[int, Tensor]:
    """Every tensor of an output as another one with the same numbers."""
    return {id(tensor): tensor.view_as(tensor) for tensor in tensors_in(output)}
