"""The reference loop around `PrivateTraining`: batches, losses, steps, checkpoints, signals.

Ctrl-C and SIGTERM finish the step in progress and write a checkpoint; of several ranks, all do so
after the same step, whichever of them was told.
"""

from __future__ import annotations

import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import torch
from torch.utils.data import DataLoader

from shuffled_dpsgd.accounting import PrivacyClaim
from shuffled_dpsgd.errors import BudgetExhaustedError, CheckpointError, InvalidArgumentError
from shuffled_dpsgd.runtime.attention import without_cudnn_attention
from shuffled_dpsgd.training.checkpoint import Stateful, load_checkpoint, save_checkpoint
from shuffled_dpsgd.training.checkpoint_folder import latest_checkpoint
from shuffled_dpsgd.training.data import MapStyle, taken_from
from shuffled_dpsgd.training.global_randomness import loader_generator
from shuffled_dpsgd.training.metrics import StepMetrics
from shuffled_dpsgd.training.physical import PerSampleLoss, find_physical_batch_size
from shuffled_dpsgd.training.private import PrivateTraining
from shuffled_dpsgd.training.spending import SpendingCurve

Precision = Literal["float32", "bf16"]


@dataclass(frozen=True, kw_only=True)
class Progress:
    """What a callback receives after each update.

    `certified` and `paper` (heuristic) are what was spent so far, and not claims: the card of a run
    that stops here claims the plan's ε. Metrics are computed from private data without noise.
    """

    metrics: StepMetrics
    sample_norms: torch.Tensor
    seconds: float
    learning_rate: float
    certified: PrivacyClaim | None
    paper: PrivacyClaim | None


Callback = Callable[[Progress], object]
Augment = Callable[[Any, torch.Generator], Any]


@dataclass(frozen=True, kw_only=True)
class LoopSettings:
    """Settings of the loop, which do not change what is released.

    `checkpoint_dir` turns on checkpoints every `checkpoint_every` steps, at the end and at a
    signal; `checkpoint` names the one to resume from, instead of the newest. With
    `physical_batch="find"` sizes are tried until one fits. `price_steps=False` leaves ε out of the
    progress. `pad_batches` is that of `private.batches`; None pads on a GPU. `augment(batch,
    generator)` changes a batch before the loss is computed, each record by itself; every physical
    batch has a generator (on the CPU) of its own.
    """

    checkpoint_dir: str | Path | None = None
    checkpoint: str | None = None
    checkpoint_every: int = 100
    keep_checkpoints: int = 2
    precision: Precision = "float32"
    physical_batch: Literal["as-planned", "find"] = "as-planned"
    collate: Callable[[list[Any]], Any] | None = None
    augment: Augment | None = None
    num_workers: int = 0
    pad_batches: bool | None = None
    price_steps: bool = True
    extras: Mapping[str, Stateful] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a call of `train` ended: the plan finished, or a signal's name.

    `seconds` is the time of each part: data, forward and backward, finalize, noise, update,
    shuffle, checks, ledger, evaluation, checkpoints and other. `steps_lost` counts steps whose
    releases are spent and whose updates were lost in a crash.
    """

    steps_taken: int
    finished: bool
    steps_lost: int
    interrupted_by: str | None
    checkpoint: Path | None
    seconds: Mapping[str, float]


@without_cudnn_attention()
def train(
    private: PrivateTraining,
    data: MapStyle | DataLoader[Any],
    per_sample_loss: PerSampleLoss,
    *,
    settings: LoopSettings | None = None,
    callbacks: Sequence[Callback] = (),
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
    resume: bool = False,
) -> Outcome:
    """Run `private` to the end of its plan, or until a signal; `release()` when it is done.

    `per_sample_loss(model, batch)` returns one loss per record; it is refused if it is seen to
    depend on the other records of the batch. With `resume`, continue from the newest checkpoint in
    `settings.checkpoint_dir`; without any, start, but only if nothing has been released yet. The
    first checkpoint is written before the first release.
    """
    settings = settings or LoopSettings()
    records, taken = taken_from(data)
    settings = replace(
        settings,
        collate=settings.collate or taken.get("collate"),
        num_workers=settings.num_workers or taken.get("num_workers", 0),
    )
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise InvalidArgumentError(
            "scheduler",
            expected="a schedule that depends on the number of steps alone",
            got="ReduceLROnPlateau, which follows a metric",
            remedy="training metrics have no noise, so a rate that follows them is a release that "
            "no ε covers; use a cosine or linear schedule",
        )
    private.clock.start()
    extras = dict(settings.extras) | ({} if scheduler is None else {"scheduler": scheduler})
    if resume:
        _resume(private, settings, extras)
    in_bf16 = settings.precision == "bf16"
    loss = _in_bf16(per_sample_loss, private.device) if in_bf16 else per_sample_loss
    shown = loss if settings.augment is None else _augmented(loss, settings.augment)
    private.use_loss(shown, is_trained_on=True)
    if settings.physical_batch == "find":
        find_physical_batch_size(private, records, shown, collate=settings.collate)
    _refuse_untrained(private)
    with _signals() as received:
        observer = _Observer(private, settings, callbacks, scheduler, extras, received)
        if private.steps_taken == 0:
            observer.save()
        stop_observing = private.on_update(observer)
        try:
            if not private.finished:
                with private.world.explaining():
                    _run(private, records, loss, settings)
        finally:
            stop_observing()
    _refuse_untrained(private)
    if private.finished:
        private.release()
        observer.save()
    else:
        private.history.note_end()
    private.clock.stop()
    return Outcome(
        steps_taken=private.steps_taken,
        finished=private.finished,
        steps_lost=private.plan.num_steps - private.steps_taken if private.finished else 0,
        interrupted_by=observer.told[0] if observer.told else None,
        checkpoint=observer.saved,
        seconds=private.clock.seconds(),
    )


def _run(
    private: PrivateTraining,
    data: MapStyle,
    per_sample_loss: PerSampleLoss,
    settings: LoopSettings,
) -> None:
    pads = settings.pad_batches
    batches = private.batches(
        data,
        collate=settings.collate,
        num_workers=settings.num_workers,
        pad_batches=private.pads_by_default if pads is None else pads,
    )
    augment = settings.augment
    try:
        for batch in batches if augment is None else _views(private, batches, augment):
            private.backward(per_sample_loss(private.model, batch))
            private.step()
    except BudgetExhaustedError:
        # Steps lost in a crash were repeated with other sums: no releases are left for the rest.
        return


def _views(private: PrivateTraining, batches: Iterable[Any], augment: Augment) -> Iterator[Any]:
    """The batches of a run, augmented, each with a generator of its own."""
    seen: Counter[int] = Counter()
    # Ranks that split layers have the same records, and must see them alike.
    rank, size = (0, 1) if private.is_split else (private.world.rank, private.world.size)
    for batch in batches:
        step = private.steps_taken
        index = seen[step] * size + rank
        seen[step] += 1
        yield augment(batch, loader_generator(private.streams, "augmentation", step, index))


def _augmented(loss: PerSampleLoss, augment: Augment) -> PerSampleLoss:
    """The loss of augmented batches, for trials outside of the run."""

    def shown(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        seed = int(torch.randint(2**31, (), device="cpu"))
        return loss(model, augment(batch, torch.Generator().manual_seed(seed)))

    return shown


@dataclass
class _Observer:
    """Called after every update: steps the scheduler, calls the callbacks, saves checkpoints."""

    private: PrivateTraining
    settings: LoopSettings
    callbacks: Sequence[Callback]
    scheduler: torch.optim.lr_scheduler.LRScheduler | None
    extras: Mapping[str, Stateful]
    received: list[str]
    saved: Path | None = None
    told: Sequence[str] = ()
    is_due: bool = False
    started: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        self.curve = SpendingCurve(self.private.plan) if self.settings.price_steps else None

    def __call__(self) -> None:
        private, curve = self.private, self.curve
        learning_rate = float(private.optimizer.param_groups[0]["lr"])
        if self.scheduler is not None:
            self.scheduler.step()
        # A signal that one rank received stops all of them, after the same step.
        everyone = private.world.gather_texts(" ".join(self.received))
        self.told = [name for names in everyone for name in names.split()]
        assert private.last_metrics is not None
        progress = Progress(
            metrics=private.last_metrics,
            sample_norms=private.last_sample_norms,
            seconds=time.perf_counter() - self.started,
            learning_rate=learning_rate,
            certified=None if curve is None else curve.certified(private.ledger.spent),
            paper=None if curve is None else curve.paper(private.ledger.spent),
        )
        for callback in self.callbacks:
            callback(progress)
        due = private.steps_taken % self.settings.checkpoint_every == 0
        self.is_due = self.is_due or due or bool(self.told)
        # A run without a seed cannot resume inside a block of banded noise.
        if self.is_due and private.between_blocks:
            if self.told:
                private.pause()
            self.save()
            self.is_due = False
        self.started = time.perf_counter()

    def save(self) -> None:
        """Write a checkpoint, if asked for any."""
        folder, keep = self.settings.checkpoint_dir, self.settings.keep_checkpoints
        if folder is not None:
            with self.private.clock.part("checkpoints"):
                self.saved = save_checkpoint(self.private, folder, extras=self.extras, keep=keep)


def _resume(
    private: PrivateTraining, settings: LoopSettings, extras: Mapping[str, Stateful]
) -> None:
    if settings.checkpoint_dir is None:
        raise InvalidArgumentError("resume", expected="a checkpoint_dir to resume from", got=None)
    newest = latest_checkpoint(settings.checkpoint_dir)
    if settings.checkpoint is not None:
        newest = Path(settings.checkpoint_dir) / settings.checkpoint
    if newest is not None:
        load_checkpoint(private, newest, extras=extras)
    elif private.ledger.spent:
        raise CheckpointError(
            f"{settings.checkpoint_dir}: no checkpoint, but {private.ledger.spent} releases are "
            f"spent in {private.ledger.path or 'the ledger'}; starting over would spend them "
            "again: put the checkpoints back, or start another run in a fresh directory"
        )


def _refuse_untrained(private: PrivateTraining) -> None:
    """Refuse to release a run that took no step and can take none."""
    if private.steps_taken == 0 and private.finished:
        raise BudgetExhaustedError(
            f"{private.ledger.spent} of {private.plan.num_steps} releases are spent, and this run "
            "has taken not one step: resume it from its checkpoints, or start a new plan"
        )


def _in_bf16(per_sample_loss: PerSampleLoss, device: torch.device) -> PerSampleLoss:
    """The loss under autocast; backward and update are outside of it."""

    def narrow(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            return per_sample_loss(model, batch)

    return narrow


@contextmanager
def _signals() -> Iterator[list[str]]:
    """Collect SIGINT and SIGTERM; a second one acts as usual."""
    received: list[str] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def note(number: int, frame: FrameType | None) -> None:
        received.append(signal.Signals(number).name)
        for each, handler in previous.items():
            signal.signal(each, handler)

    for number in previous:
        signal.signal(number, note)
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
