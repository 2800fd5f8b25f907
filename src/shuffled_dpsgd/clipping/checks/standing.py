"""The standing check: what was booked for a sample is the gradient it has among any others.

Every other check looks for a way in which samples may meet. This one compares the quantity that
the clipping rests on. For a few samples of a batch it keeps what the engine booked: the norm and a
sketch of the per-sample gradient. Then it runs the batch again for each of them, with the other
records exchanged (`exchange.py`). The two must agree.

It runs on the first batch, on every kind of batch not seen before, on every batch while it is told
to be dense, and at random for the rest of the run. Where random numbers are drawn for more than
dropout, the first batch of a kind is looked at under many of them. What it finds is raised before
the sums are handed out.
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
from shuffled_dpsgd.clipping.capture.samples import BatchedInputs
from shuffled_dpsgd.clipping.capture.slot import Slot
from shuffled_dpsgd.clipping.checks.check_turns import CheckTurns
from shuffled_dpsgd.clipping.checks.exchange import (
    CannotCompareError,
    Disagreement,
    ExchangeTest,
)
from shuffled_dpsgd.clipping.checks.random_states import RandomStates, randomness_kept
from shuffled_dpsgd.clipping.checks.sketches import sketches_of
from shuffled_dpsgd.clipping.checks.solo_runs import Autocast, dropout_silenced, without_a_trace
from shuffled_dpsgd.clipping.checks.watch import ModelCall, Watch, random_cotangents
from shuffled_dpsgd.errors import UnsupportedModuleError
from shuffled_dpsgd.runtime.shards import Sharding

# First batches of a kind that are checked if they draw random numbers.
_RANDOM_LOOKS = 2
# Other random numbers under which the first batch of all, and of another kind, is looked at, where
# they are drawn for more than dropout. Of what happens in one batch of ten, 48 looks miss 0.6 %.
_FIRST_DRAWS, _MORE_DRAWS = 48, 8
# Samples that may be in the order that a model would bring them into, by chance.
_FEW = 8
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
        self._test = ExchangeTest(model, slots, self._parameters, inputs, sharding)
        self._looked = False
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
            samples=[],
            autocast=Autocast.now(device),
            states=RandomStates.now(self._model, self._device),
        )
        self.watch.watch_samples(self.turns.draw_samples(counted))
        return self.watch

    @property
    def _device(self) -> torch.device:
        return next(iter(self._parameters.values())).device

    def samples_of(self, batch: CapturedBatch) -> list[int]:
        """The samples of a batch that are watched, of those that count; none if it is not.

        How many count is known when the backward comes, before anything is booked.
        """
        watch = self.watch
        if watch is None or watch.batch is not batch:
            return []
        if max(watch.samples) >= batch.counted:
            watch.counted = batch.counted
            watch.watch_samples(self.turns.draw_samples(batch.counted))
        return watch.samples

    def book(self, batch: CapturedBatch, entry: Entry) -> None:
        """Keep what one recorded call contributes for the watched samples."""
        watch = self.watch
        if watch is None or watch.batch is not batch or batch.phase is Phase.SUMS:
            return
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
        watch.scale = batch.scale
        known = norms.double().cpu()
        watch.finite = torch.isfinite(known).nonzero().flatten().tolist()
        watch.norms = known[watch.samples]
        watch.typical_norm = float(known[watch.finite].median()) if watch.finite else 0.0
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
            try:
                found = self._compare(watch)
                if found is None and is_new and 1 < watch.size <= _FEW:
                    found = self._back_to_front(watch)
            except CannotCompareError:
                found = self._second_opinion(watch)
        finally:
            if not is_new:
                self.turns.note_seconds(watch.seconds + time.perf_counter() - started)
        if found is not None:
            raise _refusal(found)

    def try_batch(
        self, call: ModelCall, size: int, counted: int, autocast: Autocast, has_losses: bool
    ) -> None:
        """Check a batch that a compiler has run, by running it once more without the compiler.

        Without losses of samples, its backward may have begun at a number of the model's own.

        Raises:
            UnsupportedModuleError: naming the module that disagrees.
        """
        with autocast.again():
            found = self._trial(call, size, counted, autocast.device, numbers=not has_losses)
        if found is not None:
            raise _refusal(found)

    def _second_opinion(self, watch: Watch) -> Disagreement | None:
        """The same batch again with dropout switched off; any other randomness stays.

        Where samples do not meet, but the engine draws its numbers in another order.
        """
        used = frozenset(watch.cotangents)
        device = watch.autocast.device
        watch.states.restore()
        with watch.autocast.again():
            return self._trial(
                watch.call, watch.size, watch.counted, device, used, numbers=watch.has_numbers
            )

    def _back_to_front(self, watch: Watch) -> Disagreement | None:
        """A few samples in the other order: a model that sorts them may have left them as they
        were."""
        is_whole = len(watch.finite) == watch.counted == watch.size
        if self._test.is_random or watch.has_numbers or not is_whole:
            return None
        counts = self.num_samples, self.num_by_coin
        call = self._inputs.take(*watch.call, watch.size, range(watch.size - 1, -1, -1))
        used, device = frozenset(watch.cotangents), watch.autocast.device
        with watch.autocast.again():
            found = self._trial(call, watch.size, watch.size, device, used, numbers=False)
        self.num_samples, self.num_by_coin = counts
        return found

    def _compare(self, watch: Watch) -> Disagreement | None:
        """The first disagreement between what was booked and what samples have among others."""
        compared = 0
        with (
            self._detached(),
            without_a_trace(self._model),
            randomness_kept(self._model, self._device),
        ):
            for place in range(len(watch.samples)):
                if watch.norms is not None and not math.isfinite(float(watch.norms[place])):
                    continue
                found = self._test.compare(watch, place)
                if found is not None:
                    return found
                self.num_samples += 1
                self.num_by_coin += watch.by_coin
                compared += 1
            if compared and self._test.besides_dropout and self.turns.is_new(watch.kind):
                found = self._test.look_again(watch, 0, self._num_looks())
                if found is not None:
                    return found
        if compared:
            self.turns.note_checked(watch.kind, _RANDOM_LOOKS if self._test.is_random else 1)
        return None

    def _num_looks(self) -> int:
        first, self._looked = not self._looked, True
        return _FIRST_DRAWS if first else _MORE_DRAWS

    def _trial(
        self,
        call: ModelCall,
        size: int,
        counted: int,
        device: str,
        used: frozenset[int] | None = None,
        *,
        numbers: bool,
    ) -> Disagreement | None:
        """Run a batch for this check alone, with dropout off and random gradients at the outputs.

        `used` says which outputs get any; without it, all that have a batch axis do. So do
        `numbers` without an axis.
        """
        batch = CapturedBatch(size=size, device=device, slots=len(self._slots), scale=1.0)
        watch = self.begin(batch, call, size, device, counted)
        watch.on_trial = True
        with (
            randomness_kept(self._model, self._device),
            without_a_trace(self._model),
            self._attached(batch) as end_forward,
        ):
            args, kwargs = self._inputs.take(*call, size, range(size))
            with dropout_silenced(self._model), torch.enable_grad():
                outputs = tensors_in(self._model(*args, **kwargs))
            end_forward()
            # A mean divides the gradient of every sample by the batch size.
            number = float(size) if self._numbers_are_means else 1.0
            watch.cotangents = random_cotangents(outputs, size, used, number if numbers else None)
            places = list(watch.cotangents)
            watch.outputs = {place: outputs[place].detach() for place in places}
            torch.autograd.backward(
                [outputs[place] for place in places], list(watch.cotangents.values())
            )
        self.watch = None
        watch.batch = None
        try:
            return self._compare(watch)
        except CannotCompareError:
            return None


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
        expected="every sample of a batch to have a gradient of its own, whatever the others are",
        got=found.got,
        remedy="let no sample see another, in training mode too; return what the loss needs from "
        "the model, with the batch on one axis; draw random numbers from torch's generator, one "
        "row per sample; keep nothing from one forward to the next; checkpoint with "
        "use_reentrant=False; or freeze this module",
    )
