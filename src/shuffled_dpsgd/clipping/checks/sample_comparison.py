"""One sample in its batch and alone: its gradient is computed by itself and compared.

The two need not agree to the last bit. How far they may be apart depends on the precision of the
forward, and on what rounding leaves where the terms of a sum cancel.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shuffled_dpsgd.clipping.capture.random_tape import CannotRepeatError, ReplayedTape
from shuffled_dpsgd.clipping.capture.samples import BatchedInputs
from shuffled_dpsgd.clipping.capture.slot import Slot
from shuffled_dpsgd.clipping.checks.sketches import Sketches, distances, length, on_host, sketch
from shuffled_dpsgd.clipping.checks.solo_runs import dropout_silenced, gradients_of
from shuffled_dpsgd.clipping.checks.watch import OtherOutputsError, Watch, cotangents_of
from shuffled_dpsgd.runtime.shards import Sharding

# Relative to the length of the gradient; wider than what another batch size does to rounding.
_TOLERANCE = {torch.float64: 1e-7, torch.float32: 2e-3}
_TF32_TOLERANCE = 2e-2
# Where a forward is cast to half precision, the tolerance is measured, between these.
_LEAST_TOLERANCE, _HALF_TOLERANCE = 0.02, 0.25
# Norms may be booked a little too large, never too small: kernels add what matrix units cut off.
_NORM_HEAD_ROOM = 0.03
# Gradients far below their batch's typical one are all rounding.
_NEGLIGIBLE = 1e-4
# Roundings of the terms of a sum that may remain where the terms cancel.
_ULPS = 16.0


@dataclass(frozen=True, kw_only=True)
class Disagreement:
    """Where, and in what, a sample in its batch differs from the sample alone."""

    path: str
    got: str


class SampleComparison:
    """Compares what was booked for a sample with the gradient it has alone."""

    def __init__(
        self,
        model: nn.Module,
        slots: Sequence[Slot],
        parameters: Mapping[str, nn.Parameter],
        inputs: BatchedInputs,
        sharding: Sharding | None = None,
    ) -> None:
        self._model = model
        self._slots = slots
        self._parameters = parameters
        self._inputs = inputs
        self._sharding = sharding
        floating = [p.dtype for p in parameters.values()]
        self._smallest_step = max(torch.finfo(dtype).eps for dtype in floating)

    def compare(
        self, watch: Watch, place: int, sample: int, booked_norm: float | None
    ) -> Disagreement | None:
        """What the `place`-th watched sample has in the batch and not alone, if anything.

        `booked_norm` is None in a batch on trial, for which no norms were booked.
        """
        try:
            alone, norm = self._alone_if_it_can(watch, place, sample)
        except OtherOutputsError as error:
            return Disagreement(path="", got=str(error))
        tolerance = self._tolerance(watch)
        found = self._judge(watch, place, booked_norm, alone, norm, tolerance or _LEAST_TOLERANCE)
        if found is None or tolerance is not None:
            return found
        # Only now: it takes one more run, and allows no less.
        tolerance = self._measured_tolerance(watch, place, sample, alone)
        return self._judge(watch, place, booked_norm, alone, norm, tolerance)

    def _judge(
        self,
        watch: Watch,
        place: int,
        booked_norm: float | None,
        alone: Sketches,
        norm: float,
        tolerance: float,
    ) -> Disagreement | None:
        """What a sample alone differs in by more than the tolerance; a larger one finds no more."""
        booked = watch.booked[place]
        if watch.scale != 1.0:
            booked = {name: part * watch.scale for name, part in booked.items()}
        apart = distances(booked, alone)
        whole = max(length(booked), length(alone), _NEGLIGIBLE * watch.typical_norm)
        if whole == 0.0:
            return None
        distance = sum(part * part for part in apart.values()) ** 0.5
        rounding = _ULPS * abs(watch.scale) * sum(on_host(watch.rounding[place]))
        rounding = rounding if math.isfinite(rounding) else 0.0
        off = distance / whole
        if not distance <= tolerance * whole + rounding:
            worst = max(apart, key=lambda name: apart[name])
            return Disagreement(
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
                return Disagreement(
                    path="", got=f"a norm of {booked_norm:.6g} in the batch and {norm:.6g} alone"
                )
        return None

    def _alone_if_it_can(self, watch: Watch, place: int, sample: int) -> tuple[Sketches, float]:
        """One sample alone, or among the others if the model cannot run it alone.

        Some models take no single sample. Others cut off what is padding for all samples.
        """
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

        found: Sketches = {}
        norms: Sketches = {}

        def take(name: str, grad: Tensor) -> None:
            found[name] = sketch(grad)
            # Without a copy in double precision: a table of words is large.
            norms[name] = torch.linalg.vector_norm(grad, dtype=torch.float64)

        if self._sharding is not None:
            contexts.append(self._sharding.gradients_to(take))
        grads = gradients_of(self._model, self._parameters, call, cotangents, contexts)
        found |= {name: sketch(grad) for name, grad in grads.items()}
        if grads:
            # One call for all of them: a model has hundreds.
            lengths = torch._foreach_norm([*grads.values()], 2, dtype=torch.float64)
            norms |= dict(zip(grads, lengths, strict=True))
        return found, length(norms)

    def _tolerance(self, watch: Watch) -> float | None:
        """What rounding explains, by the type; None where the forward is cast to half precision."""
        dtypes = {parameter.dtype for parameter in self._parameters.values()}
        if self._sharding is not None:
            dtypes |= self._sharding.computed_in
        if dtypes & {torch.float16, torch.bfloat16}:
            return _HALF_TOLERANCE
        if watch.autocast.enabled:
            return None
        if torch.float32 in dtypes:
            lower = watch.autocast.device == "cuda" and torch.backends.cuda.matmul.allow_tf32
            return _TF32_TOLERANCE if lower else _TOLERANCE[torch.float32]
        return _TOLERANCE[torch.float64]

    def _measured_tolerance(self, watch: Watch, place: int, sample: int, alone: Sketches) -> float:
        """Four times what half precision does to the sample alone, within bounds."""
        try:
            precise, _ = self._alone(watch, place, sample, full=True)
        except (RuntimeError, TypeError, ValueError):
            return _HALF_TOLERANCE
        apart = distances(precise, alone).values()
        rounding = sum(x * x for x in apart) ** 0.5 / max(length(alone), 1e-30)
        return min(_HALF_TOLERANCE, max(_LEAST_TOLERANCE, 4 * rounding))

    def _path_of(self, name: str) -> str:
        paths = [slot.path for slot in self._slots if name in slot.names.values()]
        return paths[0] if paths else name
