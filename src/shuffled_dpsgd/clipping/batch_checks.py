"""When each check of a batch runs: before its forward, with its losses, and after its backward.

The checks themselves are in `checks/`. Here is their order, and how they borrow the model.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from shuffled_dpsgd.clipping.attachment import Attachment
from shuffled_dpsgd.clipping.capture.batch import CapturedBatch
from shuffled_dpsgd.clipping.capture.recorder import CaptureRecorder
from shuffled_dpsgd.clipping.capture.samples import BatchKinds
from shuffled_dpsgd.clipping.capture.slot import Slot
from shuffled_dpsgd.clipping.checks.batch_axis import BatchAxisCheck
from shuffled_dpsgd.clipping.checks.check_turns import CheckTurns
from shuffled_dpsgd.clipping.checks.compiled_calls import follow
from shuffled_dpsgd.clipping.checks.exchange import (
    ExchangeTest,
    Moved,
    tolerance_for,
)
from shuffled_dpsgd.clipping.checks.loss_independence import check_losses
from shuffled_dpsgd.core.referee import Referee
from shuffled_dpsgd.errors import CannotReplayError, RefereeError, UnsupportedModuleError
from shuffled_dpsgd.runtime.clock import Clock
from shuffled_dpsgd.runtime.output_tensors import tensors_in, with_tensors
from shuffled_dpsgd.runtime.replay import Call, Rerun, Witness
from shuffled_dpsgd.runtime.shards import Sharding, SplitLayers
from shuffled_dpsgd.runtime.uncompiled import eagerly

# Relative to a norm: half precision, and the room that engines leave.
_NORM_ROOM = 0.05


@dataclass(kw_only=True)
class _Watched:
    """A batch that is going to be looked at, and the norms that were booked for it."""

    batch: CapturedBatch
    kind: Hashable
    by_coin: bool
    norms: Tensor | None = None
    call: Call | None = None


class BatchChecks:
    """The checks of an engine: of the batch axis, of losses, and of samples that see each other.

    While a check runs the model, `is_running` is set: the engine's hooks then do nothing. With
    `numbers_are_means`, a single number among the outputs is the mean of the samples' losses.
    `num_samples` have been watched among
    exchanged records so far, `num_by_coin` of them in the first batch or in one chosen at random:
    how many others there are depends on the lengths of the records.

    With a `sharding`, all ranks lend each other weights for the checks of a batch that any of them
    checks, so that each can run the model as often as its checks ask. A batch without samples that
    count (`has_samples`) is not watched.
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        slots: Sequence[Slot],
        recorder: CaptureRecorder,
        attachment: Attachment,
        rate: float,
        numbers_are_means: bool,
        sharding: Sharding | None = None,
    ) -> None:
        self.clock = Clock()
        self.is_running = False
        self.has_samples = True
        self.num_samples = self.num_by_coin = 0
        self.axis = BatchAxisCheck(model, slots)
        self.turns = CheckTurns(rate)
        self.witness = Witness(model, self._is_busy, lambda: [recorder.anchor])
        self.witness.wants.append(self._is_watching)
        self._sharding = sharding
        # Whether some rank looks at the latest batch.
        self._owes_unshard = False
        self._model = model
        self._slots = slots
        self._recorder = recorder
        self._attachment = attachment
        self._kinds = BatchKinds(model, labels_count=numbers_are_means)
        self._draws = random.Random(0)
        self._test = ExchangeTest(model, self._draws)
        self._losses_checked = False
        self._outputs: Sequence[Tensor] = ()
        # The batch that is watched: chosen before its forward, looked at after its backward.
        self._watched: _Watched | None = None
        self._compilers = ExitStack()
        self._forward_hook: RemovableHandle | None = None

    def _is_busy(self) -> bool:
        return self.is_running

    def _is_watching(self, args: Any, kwargs: Any) -> bool:
        return self._watched is not None

    # --- a batch ---------------------------------------------------------------------------------

    def before_forward(self, args: Any, kwargs: Any, batch: CapturedBatch) -> None:
        """Check the batch axis of a call of the model, and decide whether to watch the batch."""
        self.witness.inputs.note(args, kwargs, batch.size)
        kind = self._kinds.of(args, kwargs, batch.size, batch.device)
        checks_axis = self.axis.is_due(args, kwargs, batch.size, kind)
        watched = self._watched_if_due(batch, kind)
        unsharded: Any = nullcontext()
        if self._sharding is not None:
            self._owes_unshard = self._sharding.is_any(checks_axis or watched is not None)
            unsharded = self._sharding.unsharded() if self._owes_unshard else unsharded
        with unsharded:
            if checks_axis:
                self._check_axis(args, kwargs, batch.size, kind)
        self.axis.expect(args, kwargs, batch.size, kind)
        self._watched = watched
        if watched is not None:
            # Compiled blocks would draw other random numbers than the blocks themselves.
            self._compilers.enter_context(eagerly())
        self.detach()
        if watched is not None or self.axis.shared:
            self._forward_hook = self._model.register_forward_hook(
                lambda *_: self._end_forward(), always_call=True
            )

    def _watched_if_due(self, batch: CapturedBatch, kind: Hashable) -> _Watched | None:
        is_due = batch.size > 0 and self.has_samples and self.turns.is_due(kind)
        if self._sharding is not None and self._sharding.split is not None:
            # All ranks run the model together, in checks as well.
            is_due = self._sharding.is_any(is_due)
        if is_due:
            return _Watched(batch=batch, kind=kind, by_coin=self.turns.by_coin)
        return None

    def _end_forward(self) -> None:
        """The forward is over, by its end or by an error of the model's own."""
        if self.is_running:  # One of a check, before the forward that is waited for.
            return
        self._compilers.close()
        error = sys.exception()
        if isinstance(error, RuntimeError | ValueError | IndexError) and self.axis.shared:
            error.add_note(
                f"{self.axis.shared[0].path} has no batch axis, and gives a row for every sample: "
                "add its outputs to the samples' as they are, expand its input over the batch "
                "before the layer, or freeze it with requires_grad_(False)"
            )

    def after_forward(self, batch: CapturedBatch, output: Any) -> Any:
        """Keep the outputs until the losses come; returns what the caller must get instead."""
        if self._losses_checked and (self._watched is None or self._watched.batch is not batch):
            return None
        if self._sharding is not None:
            # FSDP gathers weights when a gradient arrives at the outputs that it has seen.
            views = {id(tensor): tensor.view_as(tensor) for tensor in tensors_in(output)}
            output = with_tensors(output, views)
        self._outputs = tensors_in(output)
        return None if self._sharding is None else output

    def note_counted(self, counted: int) -> None:
        """Only so many samples of the latest batch count; the others may hold anything."""
        if self.witness.call is not None:
            self.witness.call.counted = counted

    def check_losses(self, batch: CapturedBatch, losses: Tensor) -> None:
        """Follow the first losses, and those of watched batches, back to the outputs."""
        outputs, self._outputs = self._outputs, ()
        self._recorder.muted = True
        try:
            self._losses_checked |= check_losses(losses, outputs)
        finally:
            self._recorder.muted = False
        self.follow_compiled(batch, losses)

    def check_number(self, batch: CapturedBatch, loss: Tensor) -> None:
        """One number for the whole batch goes backward: no row of it can be followed."""
        outputs, self._outputs = self._outputs, ()
        self._losses_checked |= bool(outputs)
        self.follow_compiled(batch, loss)

    def follow_compiled(self, batch: CapturedBatch, losses: Tensor | None) -> None:
        """Decide whether to watch a batch that a compiler has run; its backward is about to come.

        Without `losses` nobody can tell which gradients are going to arrive at its outputs.
        """
        if batch.compiled.inputs is None or batch.compiled.is_followed:
            return
        batch.compiled.is_followed = True
        args, kwargs, dtype = batch.compiled.inputs
        self.witness.inputs.note(args, kwargs, batch.size)
        kind = self._kinds.of(args, kwargs, batch.size, batch.device)
        self._watched = self._watched_if_due(batch, kind)
        self.witness.call = None
        is_wanted = losses is not None and self.witness.ask(args, kwargs)
        if self._watched is None and not is_wanted:
            return
        lower = dtype or torch.get_autocast_dtype(batch.device)
        autocast = batch.device, dtype is not None, lower
        call = replace(Call.now(self._model, args, kwargs), autocast=autocast)
        if self._watched is not None:
            self._watched.call = call
        if losses is not None and is_wanted:
            followed = follow(self._model, self.taken_off(), losses, call)
            self.witness.call = call if followed else None

    def check_late(self, batch: CapturedBatch) -> None:
        """Check what a compiled forward could not, before anything of its batch is handed out."""
        if batch.compiled.inputs is None:
            return
        args, kwargs, dtype = batch.compiled.inputs
        kind = self._kinds.of(args, kwargs, batch.size, batch.device)
        if self.axis.is_due(args, kwargs, batch.size, kind):
            with torch.autocast(batch.device, dtype=dtype, enabled=dtype is not None):
                self._check_axis(args, kwargs, batch.size, kind, late=True)
        self.follow_compiled(batch, None)

    def finish(self, batch: CapturedBatch, norms: Tensor) -> None:
        """The backward is over: a batch that is watched waits for `settle`."""
        if self._watched is not None and self._watched.batch is batch:
            self._watched.norms = norms

    def settle(self) -> None:
        """Look at the latest batch if it is watched, before anything of it is handed out.

        Raises:
            UnsupportedModuleError: what a sample has depends on others, or is not what was booked.
        """
        watched, owes, latest = self._watched, self._owes_unshard, self._recorder.latest
        if not (watched or owes) or latest is None or not latest.closed:
            return
        self._watched, self._owes_unshard = None, False
        unsharded = (
            nullcontext() if self._sharding is None or not owes else self._sharding.unsharded()
        )
        with self.clock.part("checks"), self.turns.time.spent(), unsharded:
            if watched is not None and watched.norms is not None:
                self._look_at(watched)

    def refuse_where_it_shows(self, referee: Referee) -> None:
        """Have the latest batch compared with plain autograd, if it is due.

        Raises:
            UnsupportedModuleError: naming the module whose sums are others.
        """
        try:
            referee.settle()
        except RefereeError as error:
            raise self._refusal(Moved(name=error.name, got=str(error))) from error

    def forget(self) -> None:
        """Drop what has not been compared yet."""
        self._watched = None

    def detach(self) -> None:
        """Leave no hook on the model."""
        if self._forward_hook is not None:
            self._forward_hook.remove()
            self._forward_hook = None

    # --- looks -----------------------------------------------------------------------------------

    def _look_at(self, watched: _Watched) -> None:
        call = watched.call or self.witness.call
        assert call is not None, "kept while it ran"
        assert watched.norms is not None, "known since its backward"
        norms = watched.norms.double().cpu()
        finite = torch.isfinite(norms).nonzero().flatten().tolist()
        if not finite:
            return
        take = None if self._sharding is None else self._sharding.gradients_to
        split = None if self._sharding is None else self._sharding.split
        # Zero times what is not finite is not zero: then a later batch has to show it.
        owes_norm = split is not None and len(finite) < len(norms)
        invents = not call.cotangents and watched.call is not None
        # The referee compares with the call itself, which has no such gradients.
        call = replace(call, cotangents={}) if invents else call
        with self.witness.replay(call, watched.batch.size, self.taken_off(), take=take) as rerun:
            if invents:
                rerun.invent_gradients(numbers=not watched.batch.has_losses)
            try:
                found = self._find_change(rerun, call, watched, finite)
                if found is None and split is not None and not owes_norm:
                    found = self._other_norm(rerun, watched, finite, split)
            except CannotReplayError as error:
                found = Moved(name="", got=str(error))
        if found is not None:
            raise self._refusal(found)
        if not owes_norm:
            self.turns.note_checked(watched.kind)
        self.num_samples += self._test.num_watched
        self.num_by_coin += self._test.num_watched * watched.by_coin

    def _find_change(
        self, rerun: Rerun, call: Call, watched: _Watched, finite: list[int]
    ) -> Moved | None:
        """What moves in every way that the outputs can be read."""
        if not call.cotangents:
            return Moved(name="", got="a loss that reaches no output of the model")
        assert watched.norms is not None, "known since its backward"
        typical = float(watched.norms[finite].median()) / abs(watched.batch.scale)
        found = None
        for reading in range(rerun.num_readings):
            rerun.reading = reading
            found = self._test.find_change(
                rerun.observe,
                watched.batch.size,
                sources=finite,
                states=call.before,
                tolerance=tolerance_for(self._model),
                typical=typical,
                is_new=self.turns.is_new(watched.kind),
                up_to=self.turns.up_to,
            )
            if found is None:
                break
        return found

    def _other_norm(
        self, rerun: Rerun, watched: _Watched, finite: list[int], split: SplitLayers
    ) -> Moved | None:
        """A sample whose gradient, put together from all ranks, has another norm than was booked.

        The sums would not show it: they are compared under the factors of the booked norms.
        """
        assert watched.norms is not None, "known since its backward"
        sample = self._draws.choice(finite)
        weights = torch.zeros(watched.batch.size, dtype=torch.float64)
        weights[sample] = 1.0 if rerun.has_numbers else watched.batch.scale
        expected = split.joint_norm(rerun.gradient(weights, last=True))
        booked, typical = float(watched.norms[sample]), float(watched.norms[finite].median())
        if abs(booked - expected) <= _NORM_ROOM * expected + 1e-3 * typical:
            return None
        return Moved(name="", got=f"a norm of {booked:.6g} where plain autograd has {expected:.6g}")

    def _refusal(self, found: Moved) -> UnsupportedModuleError:
        paths = [slot.path for slot in self._slots if found.name in slot.names.values()]
        return UnsupportedModuleError(
            paths[0] if paths else found.name,
            expected="every sample of a batch to have outputs and a gradient of its own, whatever "
            "the others are",
            got=found.got,
            remedy="let no sample see another, in training mode too; return what the loss needs "
            "from the model, with the batch on one axis; draw random numbers from torch's "
            "generator, one row per sample; keep nothing from one forward to the next; checkpoint "
            "with use_reentrant=False; or freeze this module",
        )

    # --- the model on loan -----------------------------------------------------------------------

    def _check_axis(
        self, args: Any, kwargs: Any, size: int, kind: Hashable, late: bool = False
    ) -> None:
        folded = [slot.folded for slot in self._slots]
        # Compiled blocks would be compiled with the check's hooks, as often as the compiler may.
        with self.clock.part("checks"), self.turns.time.spent(), eagerly():
            self.axis.run(args, kwargs, size, kind, late)
        self._recorder.axis_checked = True
        if [slot.folded for slot in self._slots] != folded:
            # Only then: replaced forwards make a compiled model compile again.
            self._attachment.renew()

    @contextmanager
    def taken_off(self) -> Iterator[None]:
        """Run the model as its owner wrote it."""
        self.is_running = True
        try:
            with self._attachment.lifted(), eagerly():
                yield
        finally:
            self.is_running = False
