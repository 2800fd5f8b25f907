"""The object a user works with during a run. Model and optimizer keep their types and names.

`PrivateTraining` computes nothing itself. It passes clipped sums from the engine through the core's
door to the user's own optimizer. Its parts are attributes, so that a test can replace one by a
faulty one.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader

from shuffled_dpsgd.clipping import ClippingEngine
from shuffled_dpsgd.clipping.checks.check_turns import TimeShare
from shuffled_dpsgd.core.claim import PrivacyClaim
from shuffled_dpsgd.core.ledger import Ledger
from shuffled_dpsgd.core.mechanism import ShuffledGaussianMechanism
from shuffled_dpsgd.core.plan import PrivacyPlan
from shuffled_dpsgd.core.referee import DEFAULT_RATE, Referee
from shuffled_dpsgd.core.release import Door, Exchange
from shuffled_dpsgd.core.sampler import PoissonSampler
from shuffled_dpsgd.core.streams import RandomStreams
from shuffled_dpsgd.distributed.exchange import ShardedTotals
from shuffled_dpsgd.distributed.world import World
from shuffled_dpsgd.errors import InvalidArgumentError, require
from shuffled_dpsgd.permutation import Permutation, PermutationSpec
from shuffled_dpsgd.runtime.clock import OTHER, Clock
from shuffled_dpsgd.runtime.replay import Witness
from shuffled_dpsgd.runtime.shards import held
from shuffled_dpsgd.training.card import PrivacyCard
from shuffled_dpsgd.training.claims import Claims
from shuffled_dpsgd.training.data import MapStyle, taken_from
from shuffled_dpsgd.training.drawn_batches import BatchStream, DrawnBatches
from shuffled_dpsgd.training.fingerprints import fingerprint
from shuffled_dpsgd.training.guards import (
    WeightCheck,
    check_finite,
    check_losses,
    check_scale,
    check_usable,
)
from shuffled_dpsgd.training.meeting import Meeting
from shuffled_dpsgd.training.metrics import (
    LossMeter,
    Release,
    StepMetrics,
    UnnoisedTensor,
    describe_step,
)
from shuffled_dpsgd.training.moving_clip import MovingClip, gradient_clip
from shuffled_dpsgd.training.neighbours import NeighbourTests
from shuffled_dpsgd.training.rows import DEFAULT_UNIT, Survey
from shuffled_dpsgd.training.shuffling import PermutedFrame, Shuffling
from shuffled_dpsgd.training.succession import History
from shuffled_dpsgd.training.units import (
    UnitRows,
    Units,
    by_unit,
    refuse_shared_column,
    units_of,
)
from shuffled_dpsgd.training.update import GuardedOptimizer
from shuffled_dpsgd.training.watches import ModelWatch

if TYPE_CHECKING:
    from shuffled_dpsgd.distributed.sharding import AnySharding


class PrivateTraining:
    """One private run: draws Poisson batches and updates the weights by Algorithm 1.

    Invariants: a step's ledger entry is on disk before its noise is drawn; batches are drawn by the
    sampler that the plan accounts for; the optimizer only sees privatized gradients; every release
    is checked by the core's referee.
    """

    def __init__(
        self,
        *,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        plan: PrivacyPlan,
        engine: ClippingEngine,
        sampler: PoissonSampler,
        mechanism: ShuffledGaussianMechanism,
        ledger: Ledger,
        streams: RandomStreams,
        spec: PermutationSpec | None,
        physical_batch_size: int,
        world: World | None = None,
        exchange: Exchange | None = None,
        sharding: AnySharding | None = None,
        check_rate: float = DEFAULT_RATE,
        unit: str = DEFAULT_UNIT,
        units: Units | None = None,
        budget: str | None = None,
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
        self.world = world or World()
        self._sharding = sharding
        self.unit = unit
        self.units = units
        self._trainable = {n: p for n, p in model.named_parameters() if p.requires_grad}

        # Where the run is.
        self.steps_taken = 0
        self.released = False
        self.resumed_without_ledger = False
        self.last_metrics: StepMetrics | None = None
        self.last_sample_norms: torch.Tensor = torch.empty(0)
        self.rows: Survey | None = None
        self._callbacks: list[Callable[[], object]] = []
        self._depth = 0
        self._closed_because: str | None = None
        self._num_averaged = 0

        # What watches over it.
        self.clock = engine.clock = Clock(self.device.type)
        self._losses = LossMeter()
        self._watch = ModelWatch(model, optimizer)
        self._weights = WeightCheck({name: held(p) for name, p in self._trainable.items()})
        self._check_time = getattr(engine, "check_time", None) or TimeShare()
        self.history = History(self, budget)
        self.moving_clip = MovingClip(plan)
        self._referee = self._make_referee(check_rate)
        # Other engines than our own have none.
        self._witness = None if hasattr(engine, "witness") else Witness(model, self._is_checking)
        self.witness = self._use_referee()
        self.referee = self.moving_clip.watched(self._referee)
        self.neighbours = NeighbourTests(self, rate=check_rate, check_time=self._check_time)

        # What takes a step: batches, the door to a release, the update and the shuffle.
        sharing = None if sharding is None else sharding.shards
        self._meeting = Meeting(self.world, self._trainable, sharing, alike=self.is_split)
        self._drawn = DrawnBatches(
            self,
            meeting=self._meeting,
            before_step=self._begin_step,
            take_empty_step=self._update,
        )
        self._unit_rows: UnitRows | None = None
        if plan.records_per_unit:
            engine.rows_per_sample = plan.records_per_unit
            self._unit_rows = UnitRows(
                model, plan.records_per_unit, self._rows_to_divide, self._is_checking
            )
        self._optimizer = GuardedOptimizer(optimizer, self._trainable)
        self._door = Door(
            names=(*self._trainable, *self.moving_clip.names),
            plan=plan,
            streams=streams,
            update=lambda grads: self._optimizer.update(self.moving_clip.taken(grads)),
            exchange=exchange,
            sharded=sharding is not None,
            fingerprinted=self._fingerprinted,
            timed=self.clock.part,
        )
        self.shuffling = Shuffling(
            model=model,
            optimizer=optimizer,
            plan=plan,
            spec=spec,
            streams=streams,
            sharding=sharding,
        )
        self.claims = Claims(self, self._trainable)

    def _make_referee(self, check_rate: float) -> Referee:
        engine = self.engine
        return Referee(
            self.model,
            engine,
            clip_norm=gradient_clip(self.plan),
            clip=self.plan.clip,
            groups=lambda: engine.clip_groups,
            rate=check_rate,
            scale=lambda: getattr(engine, "scale", 1.0),
            shards=self._shards(check_rate),
            rows=self._rows_in_hand,
            may_check=self._check_time.allows,
            timed=self._check_time.spent,
        )

    def _use_referee(self) -> Witness:
        """Show the referee every batch, through the witness of the engine or one of the run's."""
        if self._witness is None:
            self.engine.use_referee(self._referee)
        else:
            self._referee.witness = self._witness
            self._witness.wants.append(self._referee.wants)
        witness = self._witness or self.engine.witness
        witness.losses.scales.append(self._check_scale)
        return witness

    def _shards(self, rate: float) -> ShardedTotals | None:
        if self._sharding is None:
            return None
        return ShardedTotals(
            self._sharding, self._trainable, lambda: self.streams.coin(self.steps_taken, rate)
        )

    # -- where the run is ------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """The device of the model, to which batches are moved."""
        return next(self.model.parameters()).device

    @property
    def check_seconds(self) -> float:
        """The time all checks have taken so far; most of it is spent before the first release."""
        return self._check_time.seconds

    @property
    def closed(self) -> bool:
        """Whether the run is detached from the model and the optimizer."""
        return self._closed_because is not None

    @property
    def finished(self) -> bool:
        """Whether the plan and the ledger allow no further step."""
        return (
            self._door.exhausted
            or self.steps_taken >= self.plan.num_steps
            or not self._may_release()
        )

    @property
    def steps_per_epoch(self) -> int:
        """⌈N/B⌉ steps, in which a record is drawn once on average."""
        return math.ceil(self.plan.dataset_size / self.plan.expected_batch_size)

    @property
    def frame(self) -> Permutation | None:
        """With `noise_frame="unshuffled"`, the product of all permutations so far."""
        return self.shuffling.frame

    @property
    def shows_sums(self) -> bool:
        """Whether the released weights tell every sum, in exact arithmetic."""
        return self._optimizer.shows_sums and self.plan.clip_quantile is None

    @property
    def is_sharded(self) -> bool:
        """Whether the weights are spread over ranks."""
        return self._sharding is not None

    @property
    def is_split(self) -> bool:
        """Whether every rank has a part of each layer, and the same records."""
        return self._sharding is not None and self._sharding.split is not None

    @property
    def keeps_in_step(self) -> bool:
        """Whether ranks with other records must run the model equally often, as sharded ranks."""
        return self.is_sharded and self.world.size > 1 and not self.is_split

    @property
    def between_blocks(self) -> bool:
        """Whether the next step begins a block of noise, so that the run may stop here."""
        return self.steps_taken % self.plan.bands == 0 or not self.plan.secure

    # -- batches ---------------------------------------------------------------------------------

    def batches(
        self,
        data: MapStyle | DataLoader[Any],
        *,
        num_steps: int | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        num_workers: int | None = None,
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
        Of a `DataLoader`, its data set, collate function and workers are used, unless others are
        given; its sampler and batch size are replaced.
        """
        check_usable(self._closed_because)
        records, taken = taken_from(data)
        collate = taken.get("collate") if collate is None else collate
        workers = taken.get("num_workers", 0) if num_workers is None else num_workers
        stream = self._drawn.open(
            records,
            num_steps=num_steps,
            collate=collate,
            num_workers=workers,
            pin_memory=taken.get("pin_memory") if pin_memory is None else pin_memory,
            pad_batches=pad_batches,
            background=background,
        )
        self.neighbours.use_loader(records, collate, in_worker=workers > 0)
        return stream

    def epochs(self) -> Iterator[int]:
        """Yield the number of each epoch; inside, `batches` stops where the epoch ends.

        A resumed run continues with its epoch. An epoch is `steps_per_epoch` steps of Poisson
        sampling: a record is drawn once on average, sometimes twice, sometimes never.
        """
        return self._drawn.epochs()

    def find_units(self, data: MapStyle) -> Units | None:
        """The records of every unit, where units are drawn; read from a column if none were given.

        Raises:
            InvalidArgumentError: the plan is one of rows and the data have units, or the other way
                round, or there are more or fewer units than the plan accounts for.
        """
        if not self.plan.records_per_unit:
            refuse_shared_column(data, self.unit)
            return None
        if self.units is None:
            self.units = units_of(data, self.unit)
        if len(self.units) != self.plan.dataset_size:
            raise InvalidArgumentError(
                "data",
                expected=f"records of the {self.plan.dataset_size} units the plan accounts for",
                got=f"{len(self.units)} different ids",
                remedy="dataset_size= is the number of units",
            )
        return self.units

    @property
    def pads_by_default(self) -> bool:
        """Whether `pad_batches` pays here: on a GPU, where shapes that come again are faster."""
        return self.device.type == "cuda" and self.plan.loss_reduction == "sum"

    # -- one step, in the order in which it happens ----------------------------------------------

    def _begin_step(self, step: int) -> bool:
        """Watch the weights from here to the update; False if the ledger allows no release."""
        if not self._may_release():
            return False
        self._watch.begin(step)
        return True

    def backward(self, losses: torch.Tensor) -> None:
        """Back-propagate one loss per sample; a plain `backward()` cannot be checked.

        With `loss_reduction="mean"` declared, a scalar is taken as the mean over the physical
        batch. Otherwise it is refused, because it would shrink every gradient before the clip.
        """
        current = self._drawn.current
        count = check_losses(
            losses,
            expected=None if current is None else current.rows,
            may_be_mean=self.plan.loss_reduction == "mean",
        )
        if losses.dim() == 0 and current is not None and current.size < current.rows == 1:
            # This rank has nothing to count and runs one record to keep in step with the others.
            losses = losses.reshape(1)
        reduced = losses.dim() == 0
        self.neighbours.check_losses(losses)
        # Started here, so that a GPU has finished it when the step waits for the norms.
        self._weights.ask()
        if reduced and self._witness is None:
            self.engine.check_number(losses)
        if current is not None and current.part.weights:
            losses, count = by_unit(losses, current.part), current.part.samples
            self._num_averaged += current.size
        pads = current is not None and (self._drawn.pads or current.padded)
        if current is not None and pads:
            count = current.size
        if count > 0:
            self._losses.add(losses[:count] if pads else losses, count=count, mean=reduced)
        losses = self.moving_clip.scaled(losses, count)
        if pads:
            self.engine.backward(losses, counted=count)
        elif reduced:
            losses.backward()
        else:
            self.engine.backward(losses)
        self._settle_referee()

    def _check_scale(self, find: Callable[[], tuple[float, str]]) -> None:
        """A loss is about to go backward, in whatever way."""
        if self.ledger.spent == 0 and self.plan.sampling == "poisson":
            factor, of = find()
            mean = self.plan.loss_reduction == "mean"
            check_scale(factor * self.moving_clip.level, of, may_be_mean=mean)

    def _settle_referee(self) -> None:
        """Have the referee compare this batch, if it is due, before its inputs can change."""
        if self._referee.is_pending:
            with self.clock.part("checks"):
                self._watch.check(self.steps_taken)
                self._referee.settle()

    def step(self) -> bool:
        """Clip, batch clip, noise, update, shuffle; False until the logical batch is complete.

        With `sampling="unaccounted"` every call updates with whatever was accumulated.
        """
        if self.plan.sampling == "poisson":
            if self._drawn.current is None:
                raise InvalidArgumentError(
                    "step",
                    expected="one call per batch of private.batches(data)",
                    got="a call without a batch",
                    remedy="the sampler accounted for must be the sampler used: loop over "
                    "private.batches(loader.dataset) instead of your own loader, or plan "
                    "sampling='unaccounted', which allows no claim",
                )
            self._drawn.check_count(self.engine.sample_norms.numel())
            if self._unit_rows is not None and self._num_averaged != self._drawn.num_drawn:
                raise InvalidArgumentError(
                    "backward",
                    expected="private.backward(losses), which averages over the records of a unit",
                    got="a backward of its own",
                )
            if not self._drawn.current.completes:
                return False
        self._update()
        return True

    def _update(self) -> None:
        with self.world.explaining():
            self._update_together()

    def _update_together(self) -> None:
        """Check the batch, release its sums, update, shuffle, and call the callbacks."""
        check_usable(self._closed_because)
        require(not self.released, "step", "no step after release()", f"step {self.steps_taken}")
        self.clock.turn_to(OTHER)
        if self._sharding is not None:
            self._sharding.reshard()
        step = self.steps_taken
        with self.clock.part("checks"):
            norms, loss = self._meeting.hold(step, self._inspected_norms, self._losses)
            check_finite(norms, step=step)
            self.shuffling.try_out()
        self._release(step, norms, loss)
        self.steps_taken += 1
        self.history.note(self.claims.why_not_certified())
        if self.plan.shuffle == "every-step" and self.plan.permutes:
            with self.clock.part("shuffle"):
                self.shuffling.permute(step)
        self.discard()
        self.note_weights()
        with self.clock.part("checks"):
            self._weights.note(step)
            if self.device.type == "cpu":
                self._weights.answer()
        for callback in tuple(self._callbacks):
            callback()

    def _release(self, step: int, norms: torch.Tensor, loss: float | None) -> None:
        """Pass through the door: ledger entry, noise, update. Keeps the metrics of the step."""
        # The update may move the clip.
        frame, level = self.shuffling.frame, self.moving_clip.level
        clip_norm = self.moving_clip.clip_norm
        self.history.enter()
        norms_of_blocks = self._door.release(
            step=step,
            count=norms.numel(),
            referee=self.referee,
            ledger=self.ledger,
            mechanism=self.mechanism,
            frame=None if frame is None else PermutedFrame(frame),
        )
        norms = norms * level
        self.last_sample_norms = norms.as_subclass(UnnoisedTensor)
        self.last_metrics = describe_step(
            step=step,
            norms=norms,
            clip_norm=clip_norm,
            loss=loss,
            release=Release.of(self.plan, norms_of_blocks),
        )

    def _inspected_norms(self) -> torch.Tensor:
        """The norms of this rank's part of the batch, after the referee has checked its sums.

        The other checks before a release are started first, so that they overlap with the backward
        on a GPU.
        """
        self._watch.check(self.steps_taken)
        holders: list[LossMeter | WeightCheck] = [self._losses]
        if not self._weights.ask():
            holders.append(self._weights)
        unread = [(holder, holder.unread) for holder in holders if holder.unread is not None]
        # The only wait for the backward, and for all results at once.
        norms, *found = self.engine.read_norms(*(tensor for _, tensor in unread))
        for (holder, _), value in zip(unread, found, strict=True):
            holder.unread = value
        self._weights.answer()
        drawn = norms.numel()
        if self.plan.sampling == "poisson":
            drawn = self._drawn.num_drawn
            self._drawn.check_count(norms.numel())
        engine = self.moving_clip.counted(self.engine)
        self._door.inspect(engine, self.referee, step=self.steps_taken, drawn=drawn)
        return norms

    def discard(self) -> None:
        """Drop what was accumulated since the last update; nothing of it has been released."""
        self.engine.reset()
        self.referee.begin_step()
        self.moving_clip.forget()
        self._losses.reset()
        self._num_averaged = 0
        self._drawn.forget()
        self.shuffling.forget()

    # -- what may be done between two steps ------------------------------------------------------

    def use_loss(
        self, loss: Callable[[Any, Any], torch.Tensor], *, is_trained_on: bool = False
    ) -> None:
        """Test on batches of the run that `loss(model, batch)` treats each record by itself.

        And that it is what `backward` is given, unless the caller knows that it `is_trained_on`.
        """
        self.neighbours.use_loss(loss, is_trained_on=is_trained_on)

    def set_clip_norm(self, clip_norm: float) -> None:
        """Clip, and scale the noise, by another norm from the next step on: a clip schedule.

        The certified ε stays, if what is set depends on no record.
        """
        self.moving_clip.set(clip_norm)

    def on_update(self, callback: Callable[[], object]) -> Callable[[], None]:
        """Call `callback` after every update, those of empty batches included.

        The exact place for a learning-rate scheduler: `private.on_update(scheduler.step)`.
        Returns a function that takes the callback off again.
        """
        self._callbacks.append(callback)
        return lambda: self._callbacks.remove(callback)

    def pause(self) -> None:
        """End the current loop over `batches` after this step; a later loop continues the run.

        To be called by an `on_update` callback, and by all ranks after the same step.
        """
        self._drawn.pause()

    def check(self) -> None:
        """Wait for the last update and refuse weights that are not finite.

        The next step does it too, as do `release`, checkpoints and the end of `batches`.
        """
        self._weights.answer()

    def trust_buffers(self) -> None:
        """Declare the model's buffers, with their present values, public.

        Later changes are refused at the next step.
        """
        self._watch.trust_buffers()

    def note_weights(self) -> None:
        """Record the present weights, which ranks compare before the next release.

        Done after every update. After loading weights into a sharded model, call it on all ranks.
        """
        self._meeting.note_weights()

    def leave_block(self) -> None:
        """Skip to the next block of banded noise if the draws of this one are lost. Collective.

        The rest of the block counts as spent, because no further step can share its noise. A seeded
        run computes the draws again.
        """
        bands, last = self.plan.bands, self.plan.num_steps
        done = max(self.steps_taken, *(1 + each.step for each in self.ledger.entries()), 0)
        if bands == 1 or not self.plan.secure or (done == self.steps_taken and done % bands == 0):
            return
        known = {each.step for each in self.ledger.entries()}
        self.steps_taken = min(-(-done // bands) * bands, last)
        for step in range(self.steps_taken):
            if step not in known:
                self.ledger.record(step=step, token=secrets.token_hex(16))

    @contextmanager
    def whole_weights(self) -> Iterator[None]:
        """Inside, every rank has all weights of a sharded model, for example to evaluate it.

        All ranks must enter. Changes to the weights are lost. Without sharding nothing happens.
        """
        self._refuse_split()
        with nullcontext() if self._sharding is None else self._sharding.whole():
            yield

    @contextmanager
    def unsharded_layers(self) -> Iterator[None]:
        """As `whole_weights`, for models that fit on no rank: weights are gathered layer by layer.

        All ranks must enter. Those that do not run the model send their rows until all others
        leave.
        """
        self._refuse_split()
        with nullcontext() if self._sharding is None else self._sharding.unsharded():
            yield

    def _refuse_split(self) -> None:
        expected = "a model that a rank can run by itself"
        remedy = "call the model on all ranks at once"
        require(not self.is_split, "model", expected, "layers split over ranks", remedy)

    # -- the end of a run, and what may be claimed of it -----------------------------------------

    def release(self) -> None:
        """End the run: with `shuffle="at-release"`, draw one permutation and apply it.

        By equivariance the released weights then have the distribution that shuffling after
        every step gives. No step can follow. Calling it again does nothing.
        """
        if self.released:
            return
        self.check()
        if self.plan.shuffle == "at-release" and self.plan.permutes:
            self.shuffling.permute(self.plan.num_steps)
        self.released = True
        self.claims.note_released()
        self.history.note_end()

    def card(self) -> PrivacyCard:
        """The privacy card: what may be claimed about everything released so far."""
        return self.claims.card()

    @property
    def epsilon(self) -> PrivacyClaim:
        """The certified ε that may be claimed: that of the whole plan, at its δ.

        A claim: printed or formatted it shows its kind; the number alone is `epsilon.epsilon`.
        """
        return self.card().epsilon(self.plan.delta)

    def get_epsilon(self, delta: float | None = None) -> PrivacyClaim:
        """The certified ε of the steps taken so far, at any δ, as if no more had been planned.

        At the end of the plan it is what may be claimed. Of a run that stops earlier, claim
        `epsilon`, unless that number of steps was fixed in advance.
        """
        return self.card().epsilon(self.plan.delta if delta is None else delta, so_far=True)

    def close(self, *, because: str = "private.close() was called") -> None:
        """Remove all hooks, except the warning about saving weights that were not released."""
        if not self.closed:
            self.history.note_end()
        self._closed_because = because
        while self._depth:
            self.__exit__(None, None, None)
        self._optimizer.remove()
        self.neighbours.close()
        if self._sharding is not None:
            self._sharding.detach()

    def __enter__(self) -> PrivateTraining:
        if self._depth == 0:
            self.engine.__enter__()
            if self._witness is not None:
                self._witness.listen()
            self.shuffling.listen()
            if self._unit_rows is not None:
                self._unit_rows.put_on()
        self._depth += 1
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._depth == 0:  # A suspended loop that ends after the run was closed.
            return
        if isinstance(error, Exception):
            self.world.tell_failure(error)
        self._depth -= 1
        if self._depth == 0:
            if self._unit_rows is not None:
                self._unit_rows.take_off()
            self.shuffling.stop_listening()
            if self._witness is not None:
                self._witness.stop()
            self.engine.__exit__(kind, error, trace)

    # -- what the parts ask of the run -----------------------------------------------------------

    def _may_release(self) -> bool:
        return self.ledger.allows(self.steps_taken, secure=self.plan.secure)

    def _is_checking(self) -> bool:
        return self.engine.is_checking

    def _rows_in_hand(self) -> int | None:
        current = self._drawn.current
        return None if current is None else current.part.samples

    def _rows_to_divide(self) -> int | None:
        current = self._drawn.current
        return None if current is None else current.rows

    def _fingerprinted(self, sums: Mapping[str, torch.Tensor], key: bytes) -> str:
        """A fingerprint of the sums, joined over all ranks."""
        return ":".join(self.world.gather_texts(fingerprint(sums, key)))
