"""One forward, one backward, and the exact sum of clipped per-sample gradients."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from shuffled_dpsgd.clipping.arguments import (
    require_choice,
    require_losses,
    require_positive,
    require_share,
)
from shuffled_dpsgd.clipping.attachment import Attachment
from shuffled_dpsgd.clipping.batch_checks import BatchChecks
from shuffled_dpsgd.clipping.build import build_slots
from shuffled_dpsgd.clipping.capture.batch import CapturedBatch
from shuffled_dpsgd.clipping.capture.batch_size import find_batch
from shuffled_dpsgd.clipping.capture.recorder import CaptureRecorder
from shuffled_dpsgd.clipping.checks import refusals
from shuffled_dpsgd.clipping.checks.check_turns import TimeShare
from shuffled_dpsgd.clipping.contributions import cost
from shuffled_dpsgd.clipping.finalize import clip_functions
from shuffled_dpsgd.clipping.finalize.strategies import make_schedule
from shuffled_dpsgd.clipping.plan import Plan, describe
from shuffled_dpsgd.clipping.rules.linear import keep_no_copies
from shuffled_dpsgd.core.referee import DEFAULT_RATE, Referee
from shuffled_dpsgd.errors import InvalidArgumentError, UnsupportedModuleError
from shuffled_dpsgd.runtime.clock import Clock
from shuffled_dpsgd.runtime.hooks import put_first
from shuffled_dpsgd.runtime.replay import Witness
from shuffled_dpsgd.runtime.shards import LiveParameters, Sharding, held
from shuffled_dpsgd.runtime.structure import Structure
from shuffled_dpsgd.runtime.uncompiled import refuse_compiled_whole


class ClippingEngine:
    """Per-sample gradient clipping for an unmodified model.

    While the engine is active (`with engine:`), calls of the model book-keep; every `backward()`
    adds the clipped per-sample gradients of its batch to the running sum. Parameters receive no
    `.grad`. Outside the context nothing is attached to the model.

    What holds, for any model the constructor accepts and whose samples do not interact: the sum
    equals the sum over samples of clip(gradient of that sample's loss) up to rounding, and no
    sample contributes more than clip_norm·(1 + 1e-6) in Euclidean norm over all trainable
    parameters (with `clip="none"`: any amount).

    Args:
        model: Any module; its trainable parameters are taken at construction.
        clip_norm: Bound on a sample's contribution.
        clip: "flat" (min(1, C/norm)), "automatic" (C/(norm + 0.01)), "per-layer" (flat, each of
            the L layers to C/sqrt(L)) or "none".
        strategy: How norms are found: "bookkeeping" (the cheapest way per call), "mixed" (by the
            rule 2T² < PD), "instantiate" (per-sample gradients) or "ghost" (Gram matrices).
        loss_reduction: Whether the scalar given to `backward()` is the sum or the mean of the
            samples' losses.
        check_rate: The share of backwards, chosen at random, in which the batch is run once more
            with some of its records exchanged (see `checks/exchange.py`). The first batch of every
            kind is always checked. A rate of one checks every batch. Up to the default rate, checks
            at random are made while all checks have taken 0.4 % of the time at most.
        sharding: How the model is spread over ranks, if it is. Every rank must then run as many
            batches as the others, and the sums are its own rows of the total over all ranks, or
            its parts of split layers.

    Raises:
        UnsupportedModuleError: some trainable parameter cannot be handled exactly.
        InvalidArgumentError: an option is not one of the above.
    """

    def __init__(
        self,
        model: nn.Module,
        clip_norm: float = 1.0,
        clip: str = "flat",
        strategy: str = "bookkeeping",
        loss_reduction: str = "sum",
        check_rate: float = DEFAULT_RATE,
        sharding: Sharding | None = None,
    ) -> None:
        require_choice("clip", clip, clip_functions.CLIP_FUNCTIONS)
        require_choice("strategy", strategy, cost.STRATEGIES)
        require_choice("loss_reduction", loss_reduction, ("sum", "mean"))
        self.model = model
        self.clip_norm = require_positive("clip_norm", clip_norm)
        self.clip = clip
        self.strategy = strategy
        self.loss_reduction = loss_reduction
        # More where the model folds samples of several rows into one axis by itself.
        self.rows_per_sample = 1
        self._sharding = sharding
        self._parameters: Mapping[str, nn.Parameter] = {
            n: p for n, p in model.named_parameters() if p.requires_grad
        }
        owned = {name: held(p) for name, p in self._parameters.items()}
        if sharding is not None:
            self._parameters = LiveParameters(model)
            self._refuse_tracing = torch.compiler.disable(refuse_compiled_whole)
        self._frozen = {n: p for n, p in model.named_parameters() if not p.requires_grad}
        refusals.refuse_unfit(self._parameters)
        refusals.refuse_scripted(model)
        refusals.check_quantized(model)
        self._structure = Structure(model)
        self._recorder = CaptureRecorder(self._finish)
        self._batch_norms = refusals.batch_norms(model)
        refusals.refuse_batch_statistics(self._batch_norms)
        split = None if sharding is None else sharding.split
        names = frozenset[str]() if split is None else split.names
        self._slots = build_slots(model, self._recorder, names)
        self._recorder.slots = self._slots
        if sharding is not None:
            refusals.refuse_sharded(self._slots, sharding.modules)
        shapes = {n: (owned[n] if split else p).shape for n, p in self._parameters.items()}
        self._schedule = make_schedule(
            self._slots,
            shapes,
            owned,
            clip=clip,
            clip_norm=self.clip_norm,
            strategy=strategy,
            sharding=sharding,
        )
        self._recorder.sum_early = self._schedule.sum_early
        if sharding is not None and sharding.ranks > 1:
            keep_no_copies(self._slots)
        self._gradients: list[Any] = []
        self._attachment = Attachment(self._slots)
        self._checks = BatchChecks(
            model=model,
            slots=self._slots,
            recorder=self._recorder,
            attachment=self._attachment,
            rate=require_share("check_rate", check_rate),
            numbers_are_means=loss_reduction == "mean",
            sharding=sharding,
        )
        self._referee: Referee | None = None
        if sharding is None:
            self._referee = self._own_referee(check_rate)
            self.use_referee(self._referee)
        self._hooks: list[RemovableHandle] = []
        self._was_entered = False
        # The latest batch whose checks are over.
        self._finished: CapturedBatch | None = None

    def __enter__(self) -> Self:
        if self._hooks:
            raise InvalidArgumentError("engine", expected="one `with` at a time", got="a second")
        self._reshard()
        refusals.refuse_batch_statistics(self._batch_norms)
        refusals.refuse_thawed(self._frozen)
        self._structure.refuse_change()
        refusals.refuse_replaced(self._slots)
        self._attachment.put_on()
        self.witness.listen()
        begin = put_first(self.model, self._begin)
        self._hooks = [begin, self.model.register_forward_hook(self._end)]
        self._gradients = refusals.gradients_of(self._parameters)
        for parameter in self._parameters.values():
            self._recorder.use_device(parameter.device)
            break
        self._was_entered = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._attachment.take_off()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._checks.detach()
        self._recorder.close_forward()
        if error is None:
            refusals.refuse_stray_gradients(self._parameters, self._gradients)
            self._finish_checks()
            self.witness.call = None
        self.witness.stop()

    def __getstate__(self) -> dict[str, Any]:
        """Refuse copies and pickles of an active model: its hooks would take the engine along."""
        for slot in self._slots:
            slot.__getstate__()
        return vars(self)

    def backward(
        self, losses: Tensor, loss_scale: float = 1.0, *, counted: int | None = None
    ) -> None:
        """Backward of per-sample losses, shape (B,).

        `loss_scale` multiplies the losses against underflow in float16 and is divided out again
        of norms and sums. `loss_reduction` plays no part here.

        With `counted`, only the first so many samples count; the others pad the batch to a shape
        that is used again. They are in neither norms nor sums, whatever they hold.
        """
        loss_scale = require_positive("loss_scale", loss_scale)
        batch = require_losses(
            losses, self._recorder.latest, counted, any_count=self._checks.has_samples
        )
        if batch.size == 0:
            return
        counting = losses
        if counted is not None:
            counting, batch.counted = losses[:counted], counted
            self._checks.note_counted(counted)
            batch.counts_B = torch.arange(batch.size, device=losses.device) < counted
        self._checks.check_losses(batch, losses)
        batch.scale = 1.0 / loss_scale
        batch.has_losses = True
        total = counting.sum() if loss_scale == 1.0 else counting.sum() * loss_scale
        total.backward()
        if not batch.closed:
            raise InvalidArgumentError(
                "losses",
                expected="losses of the latest forward, through its trainable layers",
                got="losses of an earlier forward, or of none",
                remedy="call engine.backward after each forward, and reset() before going on",
            )
        self._finish_checks()

    @property
    def witness(self) -> Witness:
        """What listens to the model for whoever runs a batch once more."""
        return self._checks.witness

    @property
    def clock(self) -> Clock:
        """What times the parts of a step; whoever times a run puts a clock of theirs here."""
        return self._checks.clock

    @clock.setter
    def clock(self, clock: Clock) -> None:
        self._checks.clock = clock

    @property
    def sample_norms(self) -> Tensor:
        """(B,) norms, before clipping, of all samples since the last reset."""
        self._finish_checks()
        norms = self._schedule.rule.totals.norms
        return torch.cat(norms) if norms else torch.zeros(0)

    def read_norms(self, *others: Tensor) -> list[Tensor]:
        """`sample_norms` on the host, and after them other tensors."""
        return [self.sample_norms.cpu(), *(other.cpu() for other in others)]

    @property
    def num_nonfinite(self) -> int:
        """Samples since the last reset whose gradient was infinite or NaN; they count as zero."""
        return int((~torch.isfinite(self.sample_norms)).sum())

    def check_densely(self, up_to: int) -> None:
        """Have every batch checked, in sizes of up to so many rows; with 0, those in turn."""
        self._checks.turns.up_to = up_to

    @property
    def num_checked(self) -> int:
        """Samples so far that had the gradient booked for them among exchanged records too."""
        return self._checks.num_samples

    @property
    def num_checked_by_coin(self) -> int:
        """Those of them in the first batch or one chosen at random; the rest depends on lengths."""
        return self._checks.num_by_coin

    @property
    def is_checking(self) -> bool:
        """Whether the model is being run for a check of the engine's own."""
        return self._checks.is_running

    def use_referee(self, referee: Referee | None) -> None:
        """Have this one compare what is handed out, or nobody, and no longer the engine's own."""
        if self._referee is not None and self._referee is not referee:
            self.witness.wants.remove(self._referee.wants)
            self._referee = None
        if referee is not None:
            referee.witness = self.witness
            self.witness.wants.append(referee.wants)

    @property
    def scale(self) -> float:
        """What a gradient that comes back from the loss of the latest batch is multiplied by."""
        latest = self._recorder.latest
        return 1.0 if latest is None else latest.scale

    @property
    def check_time(self) -> TimeShare:
        """What checks have taken; whoever makes others for the same run adds to it."""
        return self._checks.turns.time

    def check_number(self, loss: Tensor) -> None:
        """Say what number the latest batch goes backward from, where `backward` is not called."""
        if self._recorder.latest is not None:
            self._checks.check_number(self._recorder.latest, loss)

    def lifted(self) -> AbstractContextManager[None]:
        """Inside, the model runs as its owner wrote it, and nothing is booked."""
        return self._checks.taken_off()

    @property
    def clip_groups(self) -> list[list[str]]:
        """Names of the parameters that are clipped together."""
        return [list(group.shapes) for group in self._schedule.rule.groups]

    def clipped_sum(self) -> dict[str, Tensor]:
        """The sum of clipped per-sample gradients since the last reset, by parameter name.

        float32, or float64 for float64 parameters. The tensors are the running sums themselves:
        a later backward adds to them until `reset()`. Parameters that took no part are zero.

        Raises:
            InvalidArgumentError: gradients were computed, but never inside `with engine:`, or a
                backward failed when parts of it were already in the sums.
            UnsupportedModuleError: modules or parameters were replaced, added or removed.
        """
        self._refuse_half_done()
        self._finish_checks()
        self._structure.refuse_change()
        if not self._was_entered and any(p.grad is not None for p in self._parameters.values()):
            raise InvalidArgumentError(
                "engine",
                expected="forward and backward inside `with engine:`",
                got="ordinary gradients only",
                remedy="wrap the forward and backward, and clear the gradients with zero_grad()",
            )
        return dict(self._schedule.rule.totals.sums)

    def expect_samples(self, *, any_count: bool) -> None:
        """Say whether any sample of the next batch is going to count."""
        self._checks.has_samples = any_count

    def plan(self) -> Plan:
        """How the latest calls found the norms, with figures; prints as a table."""
        return describe(self._schedule.rule.groups, self._schedule.rule.choose)

    def reset(self) -> None:
        """Forget norms and sums; tensors handed out by `clipped_sum` stay as they are."""
        self._schedule.rule.totals.clear()
        self._checks.forget()
        if self._is_half_done():
            self._recorder.latest = None

    def _begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not torch.is_grad_enabled() or _inside_backward() or self._checks.is_running:
            return
        if self._sharding is not None and torch.compiler.is_compiling():
            self._refuse_tracing()
        if not torch.compiler.is_compiling():
            self._refuse_half_done()
            self._finish_checks()
            self._reshard()
            self._structure.refuse_change()
            refusals.refuse_batch_statistics(self._batch_norms)
        input_B = find_batch(args, kwargs)
        size, device = input_B.shape[0], input_B.device.type
        scale = float(size) if self.loss_reduction == "mean" else 1.0
        batch = CapturedBatch(
            size=size, device=device, slots=len(self._slots), scale=scale, input_B=input_B
        )
        batch.rows_per_sample = self.rows_per_sample
        if not torch.compiler.is_compiling():
            self._checks.before_forward(args, kwargs, batch)
        else:
            # Kept in every trace: keeping them only when needed would compile the model twice.
            lower = torch.is_autocast_enabled(device)
            dtype = torch.get_autocast_dtype(device) if lower else None
            batch.compiled.inputs = (args, kwargs, dtype)
        self._recorder.open(batch)

    def _end(self, module: nn.Module, args: Any, output: Any) -> Any:
        if not torch.is_grad_enabled() or self._checks.is_running:
            return None
        batch = self._recorder.batch
        tapped = None
        if batch is not None and not torch.compiler.is_compiling():
            tapped = self._checks.after_forward(batch, output)
        self._recorder.close_forward()
        return tapped

    def _is_half_done(self) -> bool:
        """Whether a backward that adds to the sums layer by layer failed half way."""
        latest = self._recorder.latest
        return latest is not None and not latest.closed and latest.pending.half_done

    def _refuse_half_done(self) -> None:
        if self._is_half_done():
            raise InvalidArgumentError(
                "engine",
                expected="every backward to run to its end",
                got="one that failed when some layers were already clipped and added",
                remedy="call reset() and repeat the step; going on could count a sample twice",
            )

    def _finish(self, batch: CapturedBatch) -> None:
        if batch.size > 0:
            self._checks.check_late(batch)
            with self.clock.part("finalize"):
                self._schedule.finish(batch)
            if batch.closed:
                self._checks.finish(batch, self._schedule.rule.totals.norms[-1])
        refusals.refuse_stray_gradients(self._parameters, self._gradients)

    def _finish_checks(self) -> None:
        """Finish the checks of the latest batch, before anything of it is handed out."""
        latest = self._recorder.latest
        is_over = latest is None or latest.closed
        if is_over and latest is self._finished:
            return
        try:
            self._checks.settle()
            if self._referee is not None and is_over:
                self._checks.refuse_where_it_shows(self._referee)
        except UnsupportedModuleError:
            self.reset()
            raise
        finally:
            if is_over:
                self._finished = latest
                self._reshard()

    def _own_referee(self, rate: float) -> Referee:
        """Compares the sums of whoever uses the engine by itself."""
        return Referee(
            self.model,
            self,
            clip_norm=self.clip_norm,
            clip=self.clip,
            groups=lambda: self.clip_groups,
            rate=rate,
            scale=lambda: self.scale,
            rows=lambda: None if self._recorder.latest is None else self._recorder.latest.size,
            may_check=self.check_time.allows,
            timed=self.check_time.spent,
            door=False,
        )

    def _reshard(self) -> None:
        """Let go of the weights of other ranks, gathered for a check or left by an evaluation."""
        if self._sharding is not None:
            self._sharding.reshard()


def _inside_backward() -> bool:
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() >= 0
