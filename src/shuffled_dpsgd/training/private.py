"""What a user holds during a run. The model and the optimizer keep their types and names.

`PrivateTraining` owns no arithmetic: it passes clipped sums from the engine through the mechanism
to the user's own optimizer, and writes the ledger before each release. Its parts are attributes,
so that a test can replace one and watch the audits catch it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator
from contextlib import nullcontext
from types import TracebackType
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from shuffled_dpsgd.clipping import ClippingEngine
from shuffled_dpsgd.distributed.exchange import Exchange
from shuffled_dpsgd.distributed.world import Alone, World
from shuffled_dpsgd.errors import BudgetExhaustedError, InvalidArgumentError
from shuffled_dpsgd.permutation import Permutation, PermutationSpec, apply, draw, identity
from shuffled_dpsgd.runtime.clock import OTHER, Clock
from shuffled_dpsgd.training.adapters import guard_adapters
from shuffled_dpsgd.training.batch_stream import BatchStream
from shuffled_dpsgd.training.card import PrivacyCard, write_card
from shuffled_dpsgd.training.data import (
    LogicalBatch,
    MapStyle,
    PhysicalBatch,
    physical_batches,
    shaped,
    to_device,
)
from shuffled_dpsgd.training.fingerprints import fingerprint, summary
from shuffled_dpsgd.training.guards import (
    WeightCheck,
    check_count,
    check_finite,
    check_losses,
    check_records,
    check_usable,
)
from shuffled_dpsgd.training.launch_check import compare_records
from shuffled_dpsgd.training.layout import Layout, lengths_of
from shuffled_dpsgd.training.ledger import Ledger
from shuffled_dpsgd.training.mechanism import Mechanism, Release
from shuffled_dpsgd.training.meeting import Meeting
from shuffled_dpsgd.training.metrics import LossMeter, StepMetrics, describe_step
from shuffled_dpsgd.training.plan import PrivacyPlan
from shuffled_dpsgd.training.randomness import RandomStreams
from shuffled_dpsgd.training.rehearsal import rehearse_release, wait_for_rehearsals
from shuffled_dpsgd.training.sampler import Sampler
from shuffled_dpsgd.training.shared_ledger import SharedLedger
from shuffled_dpsgd.training.shuffle_check import ShuffleCheck
from shuffled_dpsgd.training.update import GuardedOptimizer
from shuffled_dpsgd.training.watches import ModelWatch


class PrivateTraining:
    """One private run: Poisson batches in, noisy updates out, Algorithm 1 in between.

    Invariants: a step's ledger entry is durable before its noise is drawn; the batches are those
    of the sampler the plan accounts for; the optimizer only ever sees privatized gradients.
    """

    def __init__(
        self,
        *,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        plan: PrivacyPlan,
        engine: ClippingEngine,
        sampler: Sampler,
        mechanism: Mechanism,
        ledger: Ledger | SharedLedger,
        streams: RandomStreams,
        spec: PermutationSpec | None,
        physical_batch_size: int,
        world: World | None = None,
        exchange: Exchange | None = None,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.plan = plan
        self.engine = engine
        self.sampler = sampler
        self.mechanism = mechanism
        self.ledger = ledger
        self.streams = streams
        self.spec = spec
        self.physical_batch_size = physical_batch_size
        self.world: World = world or Alone()
        self._exchange = exchange
        self._meeting = Meeting(self.world)
        self._compared: MapStyle | None = None
        self.steps_taken = 0
        self.released = False
        self.frame: Permutation | None = None
        if plan.noise_frame == "unshuffled" and plan.permutes and spec is not None:
            self.frame = identity(spec, self.device)
        self.last_metrics: StepMetrics | None = None
        self.last_sample_norms = torch.empty(0)
        self._trainable = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self._callbacks: list[Callable[[], object]] = []
        self._losses = LossMeter()
        self.clock = engine.clock = Clock(self.device.type)
        self._current: PhysicalBatch | None = None
        self._pads = False
        self._layout: tuple[MapStyle, tuple[int, bool], Layout] | None = None
        self._drawn = 0
        self._depth = 0
        self._exhausted = False
        self._pausing = False
        self._closed_because: str | None = None
        self._epoch_end: int | None = None
        self._stream: object = None
        self._watch = ModelWatch(model, optimizer)
        self._weights = WeightCheck(self._trainable)
        self._shuffles: ShuffleCheck | None = None
        if plan.permutes and spec is not None and spec.groups:
            self._shuffles = ShuffleCheck(model, spec)
        self._listening: RemovableHandle | None = None
        self._optimizer = GuardedOptimizer(optimizer, self._trainable)
        rehearse_release(
            spec if plan.permutes else None, dict(model.named_parameters()), self.device
        )

    @property
    def device(self) -> torch.device:
        """Where the model lives, and batches are moved to."""
        return next(self.model.parameters()).device

    @property
    def closed(self) -> bool:
        """Whether the run has let go of the model and the optimizer."""
        return self._closed_because is not None

    @property
    def steps_per_epoch(self) -> int:
        """⌈N/B⌉: after so many steps every record was drawn about once."""
        return math.ceil(self.plan.dataset_size / self.plan.expected_batch_size)

    @property
    def finished(self) -> bool:
        """Whether the plan and the ledger allow no further step."""
        return (
            self._exhausted
            or self.steps_taken >= self.plan.num_steps
            or not self.ledger.allows(self._token())
        )

    def batches(
        self,
        data: MapStyle,
        *,
        num_steps: int | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        pin_memory: bool | None = None,
        pad_batches: bool = False,
        background: bool | None = None,
    ) -> BatchStream:
        """Draw logical batches by Poisson sampling and yield them in physical batches.

        Runs to the end of the plan, inside `for epoch in private.epochs()` to the end of the
        epoch, or for `num_steps` logical batches; `len` of what is returned counts those. Tuple
        samples come as `Batch` (unpack, or `.x` and `.y`), dictionaries as dictionaries, tensors
        on the model's device. A logical batch may be empty: its step (noise only) happens here,
        between two yields, and nothing is yielded for it; `on_update` callbacks see it.

        Samples of one logical batch come sorted by length where the data can say how long a record
        is (`layout.lengths_of`). With `pad_batches`, physical batches have a few fixed shapes: the
        last rows of some are copies that do not count, and only `private.backward` knows which.
        With `background`, a thread loads ahead; that and `pin_memory` are on for a GPU by default.
        """
        if self.plan.sampling != "poisson":
            raise InvalidArgumentError(
                "sampling",
                expected="'poisson' for private.batches",
                got=self.plan.sampling,
                remedy="feed your own batches inside `with private:`, or plan Poisson sampling",
            )
        check_usable(self._closed_because)
        check_records(data, dataset_size=self.plan.dataset_size)
        if self.world.size > 1 and self._compared is not data:
            compare_records(self.world, data)
            self._compared = data
        if self.finished:
            raise BudgetExhaustedError(
                f"after {self.steps_taken} steps, {self.ledger.spent} of the "
                f"{self.plan.num_steps} releases of the plan are spent. One pass over "
                "private.batches(data) runs the whole plan: for a pass per epoch write `for epoch "
                "in private.epochs():` around it. The model is trained; for more steps start a "
                "run with a larger plan"
            )
        if pad_batches and self.plan.loss_reduction == "mean":
            raise InvalidArgumentError(
                "pad_batches",
                expected="losses of single samples, loss_reduction='sum'",
                got="loss_reduction='mean', a mean over the rows that do not count as well",
            )
        on_gpu = self.device.type == "cuda"
        last = self.plan.num_steps if self._epoch_end is None else self._epoch_end
        last = last if num_steps is None else min(last, self.steps_taken + num_steps)
        steps = range(self.steps_taken, last)
        options = {
            "layout": self.layout(data, pad_batches=pad_batches),
            "collate": collate,
            "num_workers": num_workers,
            "pin_memory": on_gpu if pin_memory is None else pin_memory,
            "background": on_gpu if background is None else background,
        }
        return BatchStream(self._batches(data, steps, options), num_steps=len(steps))

    def epochs(self) -> Iterator[int]:
        """Number the epochs of the plan; inside, `batches` stops where the epoch ends.

        Goes on where a resumed run was. An epoch is `steps_per_epoch` steps of Poisson sampling:
        a record is drawn once on average, sometimes twice, sometimes never.
        """
        try:
            while not self.finished:
                epoch = self.steps_taken // self.steps_per_epoch
                self._epoch_end = min((epoch + 1) * self.steps_per_epoch, self.plan.num_steps)
                before = self.steps_taken
                yield epoch
                if self.steps_taken == before:
                    return
        finally:
            self._epoch_end = None

    @property
    def pads_by_default(self) -> bool:
        """Whether `pad_batches` pays here: on a GPU, where shapes that come again are faster."""
        return self.device.type == "cuda" and self.plan.loss_reduction == "sum"

    def layout(self, data: MapStyle, *, pad_batches: bool = False) -> Layout:
        """How logical batches of `data` are put into physical ones."""
        key = self.physical_batch_size, pad_batches
        if self._layout is None or self._layout[0] is not data or self._layout[1] != key:
            layout = Layout(
                batch_size=self.physical_batch_size,
                expected=math.ceil(self.plan.expected_batch_size / self.world.size),
                lengths=lengths_of(data),
                pads=pad_batches,
                device=self.device.type,
                max_length=getattr(
                    getattr(self.model, "config", None), "max_position_embeddings", None
                ),
            )
            self._layout = data, key, layout
            self.engine.expect_lengths([shape.length for shape in layout.shapes if shape.length])
        return self._layout[2]

    def backward(self, losses: torch.Tensor) -> None:
        """Back-propagate one loss per sample; `losses.sum().backward()` does the same.

        With `loss_reduction="mean"` declared, a scalar is taken as the mean over the physical
        batch; without it, refused, as it would scale every gradient down before the clip.
        """
        current = self._current
        count = check_losses(
            losses,
            expected=None if current is None else current.rows,
            may_be_mean=self.plan.loss_reduction == "mean",
        )
        reduced = losses.dim() == 0
        if current is not None and self._pads:
            self._losses.add(losses[: current.size], count=current.size, mean=False)
            self.engine.backward(losses, counted=current.size)
            return
        self._losses.add(losses, count=count, mean=reduced)
        if reduced:
            losses.backward()
        else:
            self.engine.backward(losses)

    def step(self) -> bool:
        """Clip, batch clip, noise, update, shuffle; False until the logical batch is complete.

        With `sampling="unaccounted"` every call updates with whatever was accumulated.
        """
        if self.plan.sampling == "poisson":
            if self._current is None:
                raise InvalidArgumentError(
                    "step",
                    expected="one call per batch of private.batches(data)",
                    got="a call without a batch",
                    remedy="the sampler accounted for must be the sampler used: loop over "
                    "private.batches(loader.dataset) instead of your own loader, or plan "
                    "sampling='unaccounted', which allows no claim",
                )
            check_count(self._count, drawn=self._drawn, padded=self._pads)
            if not self._current.completes:
                return False
        self._update()
        return True

    def discard(self) -> None:
        """Drop what was accumulated since the last update; nothing of it has been released."""
        self.engine.reset()
        self._losses.reset()
        self._current = None
        self._drawn = 0
        if self._shuffles is not None:
            self._shuffles.forget()

    def pause(self) -> None:
        """End the present loop over `batches` after this step; another may go on later.

        For a callback of `on_update`. Of several ranks, all must call it after the same step.
        """
        self._pausing = True

    def trust_buffers(self) -> None:
        """Take the model's buffers as they are now for public.

        A forward that changes them afterwards is noticed at the next step and refused.
        """
        self._watch.trust_buffers()

    def check(self) -> None:
        """Wait for the last update and refuse weights that are not finite.

        The next step does it too, as do `release`, checkpoints and the end of `batches`.
        """
        self._weights.answer()

    def on_update(self, callback: Callable[[], object]) -> Callable[[], None]:
        """Call `callback` after every update, those of empty batches included.

        The exact place for a learning-rate scheduler: `private.on_update(scheduler.step)`.
        Returns a function that takes the callback off again.
        """
        self._callbacks.append(callback)
        return lambda: self._callbacks.remove(callback)

    def release(self) -> None:
        """End the run: with `shuffle="at-release"`, draw one permutation and apply it.

        By equivariance the released weights then have the distribution that shuffling after
        every step gives. No step can follow. Calling it again does nothing.
        """
        if self.released:
            return
        self.check()
        if self.plan.shuffle == "at-release" and self.plan.permutes:
            self._permute(self.plan.num_steps)
        self.released = True

    def card(self) -> PrivacyCard:
        """What may be said about everything released so far."""
        return write_card(
            self.plan,
            num_steps=self.ledger.spent,
            spec=self.spec,
            released=self.released,
            shuffles_verified=0 if self._shuffles is None else self._shuffles.num_verified,
            samples_checked=self.engine.num_checked_by_coin,
        )

    def close(self, *, because: str = "private.close() was called") -> None:
        """Detach from the model and the optimizer; nothing of ours stays on them."""
        self._closed_because = because
        while self._depth:
            self.__exit__(None, None, None)
        self._optimizer.remove()

    def __enter__(self) -> PrivateTraining:
        if self._depth == 0:
            self.engine.__enter__()
            if self._shuffles is not None:
                self._listening = self._shuffles.listen()
        self._depth += 1
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._depth == 0:  # A loop that was suspended when the run was closed ends only now.
            return
        if isinstance(error, Exception):
            self.world.tell_failure(error)
        self._depth -= 1
        if self._depth == 0:
            if self._listening is not None:
                self._listening.remove()
                self._listening = None
            self.engine.__exit__(kind, error, trace)

    @property
    def _count(self) -> int:
        """Number of records whose gradients are in the engine's sums."""
        return self.engine.sample_norms.numel()

    def _token(self, sums: dict[str, torch.Tensor] | None = None) -> str:
        """What the next release is known by; without `sums`, what its token begins with.

        In a seeded run the same step from the same weights with the same sums is the same
        release. From other weights or with other sums (changed settings or data, a device that
        does not repeat itself) it is a new one, with noise used before: it is counted. Every bit
        of the sums counts; of the weights a summary does, since equal sums under equal noise are
        one release wherever they start from.
        """
        if self.plan.secure:
            return self.streams.token(self.steps_taken)
        key, start = self.ledger.key, self._weights_summary()
        shares = [] if sums is None else self.world.gather(fingerprint(sums, key))
        whole = ":".join(shares) if shares else None
        return self.streams.token(self.steps_taken, key=key, start=start, sums=whole)

    def _weights_summary(self) -> str:
        return summary([p.detach() for p in self._trainable.values()])

    def _batches(
        self, data: MapStyle, steps: range, options: dict[str, Any]
    ) -> Generator[Any, None, None]:
        share = self._meeting.part
        logical = (
            LogicalBatch(step=step, indices=share(step, self.sampler.indices(step).tolist()))
            for step in steps
        )
        self.streams.renew()
        stream = self._stream = object()
        self._pads = options["layout"].pads
        self._pausing = False
        with self:
            self.discard()
            loaded = physical_batches(
                data,
                logical,
                generator=self.streams.torch("loader", self.steps_taken),
                **options,
            )
            try:
                while not self._pausing and (part := self._next(loaded)) is not None:
                    if self._drawn == 0:
                        if not self.ledger.allows(self._token()):
                            break
                        self._watch.begin(part.step)
                    self._current = part
                    self._drawn += part.size
                    if part.data is None:
                        self._update()
                        continue
                    with self.clock.part("data"):
                        batch = to_device(shaped(part.data), self.device)
                    self.clock.turn_to("forward and backward")
                    yield batch
                    self.clock.turn_to(OTHER)
                    self._check_stepped(part, stream)
                self.check()
            finally:
                # A loop given up earlier may be closed only now, in the middle of another one.
                if self._stream is stream:
                    self.discard()

    def _next(self, loaded: Iterator[PhysicalBatch]) -> PhysicalBatch | None:
        with self.clock.part("data"):
            return next(loaded, None)

    def _check_stepped(self, part: PhysicalBatch, stream: object) -> None:
        if self._stream is not stream:
            raise InvalidArgumentError(
                "batches", expected="one loop over private.batches at a time", got="a second"
            )
        if not part.completes:
            check_count(self._count, drawn=self._drawn, padded=self._pads)
        elif self.steps_taken <= part.step:
            raise InvalidArgumentError(
                "step",
                expected="private.step() once per physical batch",
                got=f"no call for the batch that completes step {part.step}",
            )

    def _update(self) -> None:
        try:
            self._update_together()
        except Exception as error:
            self.world.tell_failure(error)
            raise

    def _update_together(self) -> None:
        check_usable(self._closed_because)
        if self.released:
            raise InvalidArgumentError(
                "step", expected="no step after release()", got=f"step {self.steps_taken}"
            )
        self.clock.turn_to(OTHER)
        step = self.steps_taken
        wait_for_rehearsals()
        with self.clock.part("checks"):
            norms, loss = self._meeting.hold(
                step, self._counted_norms, self._losses, self._weights_summary
            )
            self._check_step(step, norms)
        release = self._release(step)
        self.last_sample_norms = norms
        self.last_metrics = describe_step(
            step=step,
            norms=norms,
            clip_norm=self.plan.clip_norm,
            loss=loss,
            release=release,
        )
        self.steps_taken += 1
        if self.plan.shuffle == "every-step" and self.plan.permutes:
            with self.clock.part("shuffle"):
                self._permute(step)
        self.discard()
        with self.clock.part("checks"):
            self._weights.ask(step, wait=self.device.type == "cpu")
        for callback in tuple(self._callbacks):
            callback()

    def _counted_norms(self) -> torch.Tensor:
        """The norms of this rank's part of the batch; refuses to go on if some are missing."""
        # The one wait for the backward: nothing is released before its outcome is known.
        norms = self.engine.sample_norms.detach().cpu()
        self._weights.answer()
        if self.plan.sampling == "poisson":
            check_count(norms.numel(), drawn=self._drawn, padded=self._pads)
        return norms

    def _check_step(self, step: int, norms: torch.Tensor) -> None:
        """Refuse a step that must not be taken; `norms` are those of the whole logical batch."""
        check_finite(norms, step=step)
        self._watch.check(step)
        if self._shuffles is not None:
            self._shuffles.try_out()

    def _release(self, step: int) -> Release:
        """Make the sums private and update with them; no reference to them is left behind."""
        clipped = self.engine.clipped_sum()
        sums = {name: clipped[name].contiguous() for name in self._trainable}
        exchange = self._exchange
        if exchange is not None:
            with self.clock.part("exchange"):
                sums = exchange.reduce(sums)
        with self.clock.part("ledger"):
            self._record(sums)
        with self.clock.part("noise"):
            release = self.mechanism.privatize(sums, step=step, frame=self.frame)
        if exchange is not None:
            with self.clock.part("exchange"):
                sums = exchange.spread(sums)
        with self.clock.part("update"):
            self._optimizer.update(sums)
        return release

    def _record(self, sums: dict[str, torch.Tensor]) -> None:
        try:
            self.ledger.record(step=self.steps_taken, token=self._token(sums))
        except BudgetExhaustedError:
            self._exhausted = True
            raise

    def _permute(self, step: int) -> None:
        assert self.spec is not None, "a plan that permutes has a spec"
        wait_for_rehearsals()
        guard_adapters(self.model)
        generator = self.streams.torch("permutation", step, device=self.device)
        permutation = draw(self.spec, generator)
        check = self._shuffles
        with nullcontext() if check is None else check.watching(permutation, self.optimizer):
            apply(permutation, self.model, self.optimizer)
        if self.frame is not None:
            self.frame = self.frame.then(permutation)
