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
import random
import time
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shuffled_dpsgd.clipping.capture.batch import CapturedBatch, Entry, Phase
from shuffled_dpsgd.clipping.capture.output_tensors import tensors_in
from shuffled_dpsgd.clipping.capture.random_tape import (
    CannotRepeatError,
    RecordedTape,
    ReplayedTape,
    generators_kept,
)
from shuffled_dpsgd.clipping.capture.samples import BatchedInputs
from shuffled_dpsgd.clipping.capture.slot import Slot
from shuffled_dpsgd.clipping.checks.sketches import Sketches, distances, length, sketch
from shuffled_dpsgd.clipping.checks.solo_runs import (
    Autocast,
    HostGenerators,
    dropout_silenced,
    gradients_of,
    without_a_trace,
)
from shuffled_dpsgd.clipping.checks.watch import (
    ModelCall,
    OtherOutputsError,
    Watch,
    cotangents_of,
    random_cotangents,
    rows_of,
)
from shuffled_dpsgd.errors import UnsupportedModuleError

# Backwards that are checked at random, as a share of all; and, up to that rate, the share of the
# time that has passed which those checks may take.
DEFAULT_RATE = 1 / 256
_SHARE_OF_TIME = 0.01
_SAMPLES = 2
# Relative to the length of the gradient; wider than what another batch size does to rounding.
_TOLERANCE = {torch.float64: 1e-7, torch.float32: 2e-3}
_TF32_TOLERANCE = 2e-2
_HALF_TOLERANCE = 0.25
# Norms may be booked a little too large, never too small: kernels add what matrix units cut off.
_NORM_HEAD_ROOM = 0.03
# Gradients far below their batch's typical one are all rounding.
_NEGLIGIBLE = 1e-4
# Roundings of the terms of a sum that may remain where the terms cancel.
_ULPS = 16.0
# First batches of a kind that are checked if they draw masks for dropout, or any other numbers.
_DROPOUT_LOOKS, _RANDOM_LOOKS = 2, 8
_DROPOUTS = {"bernoulli_", "native_dropout"}


class StandingCheck:
    """Decides when to check, keeps what is booked meanwhile, and compares.

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
    ) -> None:
        self.num_samples = 0
        self.num_by_coin = 0
        self.watch: Watch | None = None
        self._rate = rate
        self._numbers_are_means = numbers_are_means
        self._inputs = inputs
        self._model = model
        self._slots = slots
        self._parameters = dict(parameters)
        self._detached = detached
        self._attached = attached
        # How often each kind of batch has been checked, and how often it must be at first.
        self._checked: Counter[Hashable] = Counter()
        self._wanted: dict[Hashable, int] = {}
        self._draws = random.Random(0)
        floating = [p.dtype for p in self._parameters.values()]
        self._smallest_step = max(torch.finfo(dtype).eps for dtype in floating)
        self._pending: Watch | None = None
        self._began: float | None = None
        self._seconds_by_chance = 0.0
        self._kind: Hashable = None
        self._by_coin = False

    @property
    def is_pending(self) -> bool:
        """Whether something has been booked that is not compared yet."""
        return self._pending is not None

    # --- while a forward and its backward run ----------------------------------------------------

    def is_due(self, size: int, kind: Hashable) -> bool:
        """Whether a batch is of a new kind, or its turn has come at random."""
        self._kind = kind
        by_chance = self._draws.random() < self._rate and self._is_affordable()
        self._by_coin = by_chance or not self._checked
        return size > 0 and (by_chance or self._is_new(kind))

    def _is_new(self, kind: Hashable) -> bool:
        return self._checked[kind] < self._wanted.get(kind, 1)

    def _is_affordable(self) -> bool:
        """Whether checks at random have kept to their share of the time, unless more were asked."""
        if self._rate > DEFAULT_RATE:
            return True
        now = time.perf_counter()
        self._began = now if self._began is None else self._began
        return self._seconds_by_chance <= _SHARE_OF_TIME * (now - self._began)

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
            kind=self._kind,
            by_coin=self._by_coin,
            call=call,
            size=size,
            counted=counted,
            samples=self._drawn(counted),
            autocast=Autocast.now(device),
            host=HostGenerators.now(),
        )
        self.watch.booked = [{} for _ in self.watch.samples]
        self.watch.rounding = [0.0 for _ in self.watch.samples]
        return self.watch

    def samples_of(self, batch: CapturedBatch) -> list[int]:
        """The samples of a batch that are watched, of those that count; none if it is not.

        How many count is known when the backward comes, before anything is booked.
        """
        watch = self.watch
        if watch is None or watch.batch is not batch:
            return []
        if max(watch.samples) >= batch.counted:
            watch.counted, watch.samples = batch.counted, self._drawn(batch.counted)
            watch.booked = [{} for _ in watch.samples]
        return watch.samples

    def _drawn(self, counted: int) -> list[int]:
        return sorted(self._draws.sample(range(counted), min(_SAMPLES, counted)))

    def book(self, batch: CapturedBatch, entry: Entry) -> None:
        """Keep what one recorded call contributes for the watched samples."""
        watch = self.watch
        if watch is None or watch.batch is not batch or batch.phase is Phase.SUMS:
            return
        started = time.perf_counter()
        for name, part in entry.slot.contributions(entry.capture):
            for place, sample in enumerate(watch.samples):
                one = part.of_sample(sample)
                found, kept = sketch(one.stored(self._parameters[name].shape)), watch.booked[place]
                watch.rounding[place] += one.rounding()
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
        is_new = self._is_new(watch.kind)
        try:
            self._settle(watch)
        finally:
            if not is_new:
                self._seconds_by_chance += watch.seconds + time.perf_counter() - started

    def _settle(self, watch: Watch) -> None:
        try:
            found = self._compare(watch)
        except CannotRepeatError as error:
            got = f"random numbers that cannot be repeated: {error}"
            found = self._second_opinion(watch, _Disagreement(path="", got=got))
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

    def _second_opinion(self, watch: Watch, first: _Disagreement) -> _Disagreement | None:
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

    def _compare(self, watch: Watch) -> _Disagreement | None:
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
                found = self._compare_sample(watch, place, sample, booked_norm)
                if found is not None:
                    return found
                self.num_samples += 1
                self.num_by_coin += watch.by_coin
                compared += 1
        if compared:
            self._checked[watch.kind] += 1
            self._wanted[watch.kind] = self._looks_at(watch)
        return None

    def _looks_at(self, watch: Watch) -> int:
        """How many first batches of a kind are checked: samples may meet in some and not in others.

        Where nothing is random one batch shows as much as many.
        """
        if not self._is_random(watch):
            return 1
        only_dropout = {draw.name for draw in watch.tape.draws} <= _DROPOUTS
        return _DROPOUT_LOOKS if only_dropout and not watch.host.have_moved() else _RANDOM_LOOKS

    def _compare_sample(
        self, watch: Watch, place: int, sample: int, booked_norm: float | None
    ) -> _Disagreement | None:
        try:
            alone, norm = self._alone_if_it_can(watch, place, sample)
        except OtherOutputsError as error:
            return _Disagreement(path="", got=str(error))
        booked = {name: part * watch.scale for name, part in watch.booked[place].items()}
        tolerance = self._tolerance(watch, place, sample, alone)
        apart = distances(booked, alone)
        whole = max(length(booked), length(alone), _NEGLIGIBLE * watch.typical_norm)
        if whole == 0.0:
            return None
        distance = sum(part * part for part in apart.values()) ** 0.5
        rounding = _ULPS * abs(watch.scale) * watch.rounding[place]
        rounding = rounding if math.isfinite(rounding) else 0.0
        off = distance / whole
        if not distance <= tolerance * whole + rounding:
            worst = max(apart, key=lambda name: apart[name])
            return _Disagreement(
                path=self._path_of(worst),
                got=f"a gradient of {worst} in the batch that is {off:.1%} away from that of the "
                "same sample alone",
            )
        if booked_norm is not None:
            low, high = (1 - tolerance) * norm, (1 + tolerance + _NORM_HEAD_ROOM) * norm
            slack = _NEGLIGIBLE * watch.typical_norm + rounding
            # Squares that cancel are rounded upwards, and their root shows it.
            upward = rounding / math.sqrt(self._smallest_step)
            if not low - slack <= booked_norm <= high + slack + upward:
                return _Disagreement(
                    path="", got=f"a norm of {booked_norm:.6g} in the batch and {norm:.6g} alone"
                )
        return None

    def _alone_if_it_can(self, watch: Watch, place: int, sample: int) -> tuple[Sketches, float]:
        """One sample alone; among others where the model takes no single sample, or cuts off what
        is padding for all of them."""
        try:
            return self._alone(watch, place, sample)
        except (CannotRepeatError, torch.OutOfMemoryError):
            raise
        except (RuntimeError, ValueError, IndexError, TypeError):
            return self._alone(watch, place, sample, among_others=True)

    def _alone(
        self,
        watch: Watch,
        place: int,
        sample: int,
        *,
        full: bool = False,
        among_others: bool = False,
    ) -> tuple[Sketches, float]:
        """One sample's gradient by itself, as sketches, and its norm.

        It is run alone, or, `among_others`, in its batch with no gradient at the others' outputs.
        """
        samples = range(watch.size) if among_others else [sample]
        call = self._inputs.take(*watch.call, watch.size, samples)
        watch.host.restore()
        own = None if among_others else sample
        tape = ReplayedTape(watch.tape, sample=own, size=watch.size)
        contexts: list[Any] = [watch.autocast.again(off=full), tape]
        if watch.on_trial:
            contexts.append(dropout_silenced(self._model))

        def cotangents(outputs: Sequence[Tensor]) -> dict[int, Tensor]:
            tape.require_end()
            return cotangents_of(watch, place, outputs, among_others)

        grads = gradients_of(self._model, self._parameters, call, cotangents, contexts)
        squares = [float(grad.double().square().sum()) for grad in grads.values()]
        return {name: sketch(grad) for name, grad in grads.items()}, sum(squares) ** 0.5

    def _tolerance(self, watch: Watch, place: int, sample: int, alone: Sketches) -> float:
        """What rounding explains: by the type, or measured where the forward is cast to half."""
        dtypes = {parameter.dtype for parameter in self._parameters.values()}
        if dtypes & {torch.float16, torch.bfloat16}:
            return _HALF_TOLERANCE
        if watch.autocast.enabled:
            return min(_HALF_TOLERANCE, max(0.02, self._rounding(watch, place, sample, alone)))
        if torch.float32 in dtypes:
            lower = watch.autocast.device == "cuda" and torch.backends.cuda.matmul.allow_tf32
            return _TF32_TOLERANCE if lower else _TOLERANCE[torch.float32]
        return _TOLERANCE[torch.float64]

    def _rounding(self, watch: Watch, place: int, sample: int, alone: Sketches) -> float:
        """Four times what half precision does to the sample alone."""
        try:
            precise, _ = self._alone(watch, place, sample, full=True)
        except (RuntimeError, TypeError, ValueError):
            return _HALF_TOLERANCE
        apart = distances(precise, alone)
        return 4 * sum(x * x for x in apart.values()) ** 0.5 / max(length(alone), 1e-30)

    def _trial(
        self, call: ModelCall, size: int, counted: int, device: str, used: frozenset[int] | None
    ) -> _Disagreement | None:
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
            return _Disagreement(path="", got=f"random numbers that cannot be repeated: {error}")
        finally:
            watch.tape.restore_generators()

    def _path_of(self, name: str) -> str:
        paths = [slot.path for slot in self._slots if name in slot.names.values()]
        return paths[0] if paths else name


@dataclass(frozen=True, kw_only=True)
class _Disagreement:
    """Where, and in what, a sample in its batch differs from the sample alone."""

    path: str
    got: str


def _refusal(found: _Disagreement) -> UnsupportedModuleError:
    return UnsupportedModuleError(
        found.path,
        expected="every sample of a batch to have the gradient it has alone",
        got=found.got,
        remedy="let no sample see another, in training mode too; return what the loss needs from "
        "the model, with the batch on one axis; draw random numbers from torch's generator, one "
        "row per sample; keep nothing from one forward to the next; checkpoint with "
        "use_reentrant=False; or freeze this module",
    )
