"""The standing check: what was booked for a sample is the gradient it has by itself.

Every other check looks for a way in which samples may meet. This one compares the quantity that
the clipping rests on. For a few samples of a batch it keeps what the engine booked: the norm and a
sketch of the per-sample gradient. Then it runs each of them alone, with the engine detached and
nothing but autograd, with the same random numbers and the same gradients at the outputs. The two
must agree.

It runs on the first batch, on every kind of batch not seen before, and at random for the rest of
the run. What it finds is raised before the sums are handed out.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from shuffled_dpsgd.clipping.capture.batch import CapturedBatch, Entry, Phase
from shuffled_dpsgd.clipping.capture.output_tensors import tensors_in
from shuffled_dpsgd.clipping.capture.random_tape import (
    CannotRepeatError,
    RecordedTape,
    generators_kept,
)
from shuffled_dpsgd.clipping.capture.samples import BatchedInputs
from shuffled_dpsgd.clipping.capture.slot import Slot
from shuffled_dpsgd.clipping.checks.check_turns import CheckTurns
from shuffled_dpsgd.clipping.checks.sample_comparison import Disagreement, SampleComparison
from shuffled_dpsgd.clipping.checks.sketches import sketches_of
from shuffled_dpsgd.clipping.checks.solo_runs import (
    Autocast,
    HostGenerators,
    dropout_silenced,
    without_a_trace,
)
from shuffled_dpsgd.clipping.checks.watch import ModelCall, Watch, random_cotangents, rows_of
from shuffled_dpsgd.errors import UnsupportedModuleError
from shuffled_dpsgd.runtime.shards import Sharding

# First batches of a kind that are checked if they draw masks for dropout, or any other numbers.
_DROPOUT_LOOKS, _RANDOM_LOOKS = 2, 8
_DROPOUTS = {"bernoulli_", "native_dropout"}
# Numbers of single samples' gradients that are formed at once to be booked.
_MOST_AT_ONCE = 1 << 23


class StandingCheck:
    """Keeps what is booked for a few samples of a batch, and compares; `turns` says of which.

    `detached` takes the engine off the model for a while; `attached` puts it on for one forward of
    a batch whose entries go to this check alone, and gives the function that ends the forward.
    With `numbers_are_means`, a single number among the outputs is the mean of the samples' losses.
    `num_samples` have been checked so far, `num_by_coin` of them in the first batch or in one that
    was chosen at random. How many others there are depends on the lengths of the records.
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        slots: Sequence[Slot],
        parameters: Mapping[str, nn.Parameter],
        rate: float,
        numbers_are_means: bool,
        inputs: BatchedInputs,
        detached: Callable[[], AbstractContextManager[None]],
        attached: Callable[[CapturedBatch], AbstractContextManager[Callable[[], None]]],
        sharding: Sharding | None = None,
    ) -> None:
        self.num_samples = 0
        self.num_by_coin = 0
        self.watch: Watch | None = None
        self.turns = CheckTurns(rate)
        self._numbers_are_means = numbers_are_means
        self._inputs = inputs
        self._model = model
        self._slots = slots
        self._parameters = parameters
        self._detached = detached
        self._attached = attached
        self._comparison = SampleComparison(model, slots, self._parameters, inputs, sharding)
        self._pending: Watch | None = None

    @property
    def is_pending(self) -> bool:
        """Whether something has been booked that is not compared yet."""
        return self._pending is not None

    # --- while a forward and its backward run ----------------------------------------------------

    def begin(
        self,
        batch: CapturedBatch | None,
        call: ModelCall,
        size: int,
        device: str,
        counted: int | None = None,
    ) -> Watch:
        """Watch a batch whose forward is about to run; some of its `counted` first samples."""
        counted = size if counted is None else counted
        self.watch = Watch(
            batch=batch,
            kind=self.turns.kind,
            by_coin=self.turns.by_coin,
            call=call,
            size=size,
            counted=counted,
            samples=self.turns.draw_samples(counted),
            autocast=Autocast.now(device),
            host=HostGenerators.now(),
        )
        self.watch.booked = [{} for _ in self.watch.samples]
        self.watch.rounding = [[] for _ in self.watch.samples]
        return self.watch

    def samples_of(self, batch: CapturedBatch) -> list[int]:
        """The samples of a batch that are watched, of those that count; none if it is not.

        How many count is known when the backward comes, before anything is booked.
        """
        watch = self.watch
        if watch is None or watch.batch is not batch:
            return []
        if max(watch.samples) >= batch.counted:
            watch.counted, watch.samples = batch.counted, self.turns.draw_samples(batch.counted)
            watch.booked = [{} for _ in watch.samples]
            watch.rounding = [[] for _ in watch.samples]
        return watch.samples

    def book(self, batch: CapturedBatch, entry: Entry) -> None:
        """Keep what one recorded call contributes for the watched samples."""
        watch = self.watch
        if watch is None or watch.batch is not batch or batch.phase is Phase.SUMS:
            return
        if watch.tape.unrepeatable:
            return  # Another forward is compared instead of this one; see `_second_opinion`.
        started = time.perf_counter()
        for name, part in entry.slot.contributions(entry.capture):
            shape = self._parameters[name].shape
            sketches: list[Tensor] = []
            roundings: list[Tensor] = []
            for samples in _slices(watch.samples, shape.numel()):
                some = part.of_samples(samples)
                sketches += sketches_of(some.stored(shape)).unbind()
                roundings += some.rounding().unbind()
            for place, (found, rounding) in enumerate(zip(sketches, roundings, strict=True)):
                kept = watch.booked[place]
                watch.rounding[place].append(rounding)
                kept[name] = kept[name] + found if name in kept else found
        watch.seconds += time.perf_counter() - started

    def finish(self, batch: CapturedBatch, norms: Tensor) -> None:
        """The backward is over: what was booked waits for `settle`."""
        watch = self.watch
        if watch is None or watch.batch is not batch:
            return
        self.watch = None
        watch.scale = watch.number_scale = batch.scale
        if self._numbers_are_means and not batch.has_losses:
            watch.number_scale = 1.0
        if not watch.tape.unrepeatable:
            finite = norms[torch.isfinite(norms)]
            watch.norms = norms[watch.samples].double().cpu()
            watch.typical_norm = float(finite.median()) if finite.numel() else 0.0
        watch.batch = None
        self._pending = watch

    def forget(self) -> None:
        """Drop what has not been compared yet."""
        self.watch = self._pending = None

    # --- afterwards ------------------------------------------------------------------------------

    def settle(self) -> None:
        """Compare what is pending.

        Raises:
            UnsupportedModuleError: naming the module that disagrees.
        """
        watch, self._pending = self._pending, None
        if watch is None:
            return
        started = time.perf_counter()
        is_new = self.turns.is_new(watch.kind)
        try:
            self._settle(watch)
        finally:
            if not is_new:
                self.turns.note_seconds(watch.seconds + time.perf_counter() - started)

    def _settle(self, watch: Watch) -> None:
        try:
            found = self._compare(watch)
        except CannotRepeatError as error:
            got = f"random numbers that cannot be repeated: {error}"
            found = self._second_opinion(watch, Disagreement(path="", got=got))
        if found is not None:
            raise _refusal(found)

    def try_batch(self, call: ModelCall, size: int, counted: int, autocast: Autocast) -> None:
        """Check a batch that a compiler has run, by running it once more without the compiler.

        Raises:
            UnsupportedModuleError: naming the module that disagrees.
        """
        with autocast.again():
            found = self._trial(call, size, counted, autocast.device, None)
        if found is not None:
            raise _refusal(found)

    def _is_random(self, watch: Watch) -> bool:
        return bool(watch.tape.draws) or bool(watch.tape.unrepeatable) or watch.host.have_moved()

    def _second_opinion(self, watch: Watch, first: Disagreement) -> Disagreement | None:
        """The same batch again with dropout switched off; any other randomness stays.

        Only where the first comparison could not be made. One that was made and failed is final:
        samples that meet now and then need not meet again when the batch is run once more.
        """
        used = frozenset(watch.rows)
        device = watch.autocast.device
        watch.host.restore()
        with watch.autocast.again():
            found = self._trial(watch.call, watch.size, watch.counted, device, used)
        return None if found is None else first

    def _compare(self, watch: Watch) -> Disagreement | None:
        """The first disagreement between what was booked and what samples have alone."""
        if watch.tape.unrepeatable:
            raise CannotRepeatError(watch.tape.unrepeatable)
        compared = 0
        with (
            self._detached(),
            without_a_trace(self._model),
            generators_kept(watch.tape.generators),
        ):
            for place, sample in enumerate(watch.samples):
                booked_norm = None if watch.norms is None else float(watch.norms[place])
                if booked_norm is not None and not math.isfinite(booked_norm):
                    continue
                found = self._comparison.compare(watch, place, sample, booked_norm)
                if found is not None:
                    return found
                self.num_samples += 1
                self.num_by_coin += watch.by_coin
                compared += 1
        if compared:
            self.turns.note_checked(watch.kind, self._looks_at(watch))
        return None

    def _looks_at(self, watch: Watch) -> int:
        """How many first batches of a kind are checked: samples may meet in some and not in others.

        Where nothing is random one batch shows as much as many.
        """
        if not self._is_random(watch):
            return 1
        only_dropout = {draw.name for draw in watch.tape.draws} <= _DROPOUTS
        return _DROPOUT_LOOKS if only_dropout and not watch.host.have_moved() else _RANDOM_LOOKS

    def _trial(
        self, call: ModelCall, size: int, counted: int, device: str, used: frozenset[int] | None
    ) -> Disagreement | None:
        """Run a batch for this check alone, with dropout off and random gradients at the outputs.

        `used` says which outputs get any; without it, all that have a batch axis do.
        """
        batch = CapturedBatch(size=size, device=device, slots=len(self._slots), scale=1.0)
        watch = self.begin(batch, call, size, device, counted)
        watch.on_trial = True
        with without_a_trace(self._model), self._attached(batch) as end_forward:
            args, kwargs = self._inputs.take(*call, size, range(size))
            with dropout_silenced(self._model), RecordedTape(watch.tape), torch.enable_grad():
                outputs = tensors_in(self._model(*args, **kwargs))
            end_forward()
            # The mean's gradient is divided by the batch size, the single sample's by one.
            number = float(size) if self._numbers_are_means else 1.0
            watch.number_scale = 1.0 / number
            grads = random_cotangents(outputs, size, used, number)
            for place, grad in grads.items():
                watch.rows[place] = rows_of(grad, watch)
            torch.autograd.backward([outputs[i] for i in grads], list(grads.values()))
        self.watch = None
        watch.batch = None
        try:
            return self._compare(watch)
        except CannotRepeatError as error:
            return Disagreement(path="", got=f"random numbers that cannot be repeated: {error}")
        finally:
            watch.tape.restore_generators()


def _slices(samples: Sequence[int], numbers: int) -> list[slice]:
    """Slices that pick the samples in order: all at once, where their gradients are not large.

    >>> _slices([3, 8], 100), _slices([3, 8], _MOST_AT_ONCE)
    ([slice(3, 9, 5)], [slice(3, 4, 1), slice(8, 9, 1)])
    """
    if len(samples) == 2 and len(samples) * numbers <= _MOST_AT_ONCE:
        first, last = samples
        return [slice(first, last + 1, last - first)]
    return [slice(sample, sample + 1, 1) for sample in samples]


def _refusal(found: Disagreement) -> UnsupportedModuleError:
    return UnsupportedModuleError(
        found.path,
        expected="every sample of a batch to have the gradient it has alone",
        got=found.got,
        remedy="let no sample see another, in training mode too; return what the loss needs from "
        "the model, with the batch on one axis; draw random numbers from torch's generator, one "
        "row per sample; keep nothing from one forward to the next; checkpoint with "
        "use_reentrant=False; or freeze this module",
    )
