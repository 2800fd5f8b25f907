"""One sample of a batch, run again among other records: its gradient must stay where it is.

The batch is run once more, with the engine detached and nothing but autograd, with the same random
numbers and at the same shape. All records but the watched one are exchanged for others of the
batch, and the gradient that comes back from the loss is kept at the watched row alone. Whatever
makes samples meet then changes the sample's gradient, be it random or not.

The two need not agree to the last bit. How far they may be apart depends on the precision of the
forward, and on what rounding leaves where the terms of a sum cancel.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shuffled_dpsgd.clipping.capture.output_tensors import tensors_in
from shuffled_dpsgd.clipping.capture.samples import BatchedInputs
from shuffled_dpsgd.clipping.capture.slot import Slot
from shuffled_dpsgd.clipping.checks.random_states import DrawsNoted, RandomStates, seed_all
from shuffled_dpsgd.clipping.checks.sketches import Sketches, distances, length, on_host, sketch
from shuffled_dpsgd.clipping.checks.solo_runs import dropout_silenced, gradients_of
from shuffled_dpsgd.clipping.checks.watch import OtherOutputsError, Watch, cotangents_of, row_of
from shuffled_dpsgd.clipping.rules.trial_runs import without_fast_attention
from shuffled_dpsgd.runtime.shards import Sharding

# Relative to the length of the gradient; wider than what rounding does.
_TOLERANCE = {torch.float64: 1e-7, torch.float32: 2e-3}
_TF32_TOLERANCE = 2e-2
# In half precision: between two runs of one shape, and of what the engine books.
_HALF_TOLERANCES = 0.02, 0.25
# Norms may be booked a little too large, never too small: kernels add what matrix units cut off.
_NORM_HEAD_ROOM = 0.03
# Gradients far below their batch's typical one are all rounding.
_NEGLIGIBLE = 1e-4
# Rows that are compared in one look.
_MOST_KEPT = 16
# Roundings of the terms of a sum that may remain where the terms cancel.
_ULPS = 16.0


class CannotCompareError(Exception):
    """The engine drew other random numbers than the model does without it."""


@dataclass(frozen=True, kw_only=True)
class Disagreement:
    """Where, and in what, a sample's gradient differs."""

    path: str
    got: str


@dataclass(frozen=True, kw_only=True)
class _Run:
    """The gradient of a sample in one run, as sketches, with its norm and the sample's outputs."""

    grads: Sketches
    norm: float
    rows: dict[int, Tensor]


class ExchangeTest:
    """Compares what was booked for a sample with the gradient it has among other records.

    `draws` is the random stream that chooses them. `is_random` and `besides_dropout` say what the
    latest batch drew.
    """

    def __init__(
        self,
        model: nn.Module,
        slots: Sequence[Slot],
        parameters: Mapping[str, nn.Parameter],
        inputs: BatchedInputs,
        sharding: Sharding | None = None,
        draws: random.Random | None = None,
    ) -> None:
        self.is_random = False
        self.besides_dropout = False
        self._model = model
        self._slots = slots
        self._parameters = parameters
        self._inputs = inputs
        self._sharding = sharding
        self._draws = draws or random.Random(0)
        floating = [p.dtype for p in parameters.values()]
        self._smallest_step = max(torch.finfo(dtype).eps for dtype in floating)

    def compare(self, watch: Watch, place: int) -> Disagreement | None:
        """What the `place`-th watched sample has in its batch and not among others, if anything.

        Raises:
            CannotCompareError: the engine drew other numbers, and samples do not meet.
        """
        if not watch.cotangents:
            return Disagreement(path="", got="a loss that reaches no output of the model")
        found = None
        for reading in range(watch.num_readings):
            try:
                found = self._compare(watch, place, reading)
            except OtherOutputsError as error:
                found = Disagreement(path="", got=str(error))
            if found is None:
                return None
        return found

    def _compare(self, watch: Watch, place: int, reading: int) -> Disagreement | None:
        sample = watch.samples[place]
        if watch.has_numbers:
            return self._compare_numbers(watch, place)
        order, elsewhere = self._run_elsewhere(watch, sample, reading)
        booked = watch.booked[place]
        if watch.scale != 1.0:
            booked = {name: part * watch.scale for name, part in booked.items()}
        rounding = _ULPS * abs(watch.scale) * sum(on_host(watch.rounding[place]))
        rounding = rounding if math.isfinite(rounding) else 0.0
        strict, loose = self._tolerances(watch)
        if not self.is_random and watch.size > 1:
            # In another row as well: a model may sort its samples, or know them by their rows.
            row = (sample + 1) % watch.size
            moved = [sample if at == row else source for at, source in enumerate(order)]
            moved[sample] = row if row in (watch.finite or order) else order[row]
            again = self._run(watch, sample, moved, reading, row).grads
            there = self._judge(watch, elsewhere.grads, again, 0.0, strict)
            if there is not None:
                return Disagreement(path=there.path, got=f"{there.got} in another row")
        found = self._judge(watch, booked, elsewhere.grads, rounding, strict)
        off = None
        if watch.norms is not None:
            off = self._judge_norms(watch, float(watch.norms[place]), elsewhere.norm, rounding)
        if found is None and off is None:
            return None
        among = self._run(watch, sample, range(watch.size), reading)
        meets = self._judge(watch, among.grads, elsewhere.grads, 0.0, strict)
        if meets is not None and order != list(range(watch.size)):
            return Disagreement(
                path=meets.path,
                got=f"{meets.got} once the other records of its batch are exchanged, under the "
                "same random numbers",
            )
        if meets is not None:
            return Disagreement(path=meets.path, got=f"{meets.got} when the batch is run again")
        if self.is_random and self._drew_other_numbers(watch, sample, among, reading):
            raise CannotCompareError
        found = self._judge(watch, booked, elsewhere.grads, rounding, loose) or off
        return found and Disagreement(path=found.path, got=f"{found.got} by plain autograd")

    def _compare_numbers(self, watch: Watch, place: int) -> Disagreement | None:
        """A model that returns one number for the batch: what another record in a row changes.

        With the sample i in its row and with another k there, the gradients differ by g_i − g_k,
        whatever the others are.
        """
        if watch.size < 2:
            return None
        sample = watch.samples[place]
        other = watch.samples[place - 1] if len(watch.samples) > 1 else (sample + 1) % watch.size
        changes = []
        for order in (list(range(watch.size)), self._exchanged(watch, sample)):
            there = [other if row == sample else source for row, source in enumerate(order)]
            one, two = (self._run(watch, sample, each, 0).grads for each in (order, there))
            changes.append(_minus(one, two))
        among, elsewhere = changes
        strict, loose = self._tolerances(watch)
        found = self._judge(watch, among, elsewhere, 0.0, strict)
        if found is not None:
            return Disagreement(path=found.path, got=f"{found.got} once others are exchanged")
        if self.is_random or len(watch.samples) < 2:
            return None
        booked = _minus(watch.booked[place], watch.booked[place - 1], watch.scale)
        return self._judge(watch, booked, among, 0.0, loose)

    # --- more looks, without gradients -----------------------------------------------------------

    def look_again(self, watch: Watch, place: int, times: int) -> Disagreement | None:
        """Whether the sample's outputs stay what they are when random numbers fall otherwise.

        Samples that meet in one batch of ten need not have met in this one.
        """
        sample = watch.samples[place]
        if watch.size < 2:
            return None
        for _ in range(times):
            seed_all(self._draws.getrandbits(32))
            states = RandomStates.now(self._model, watch.states.shared.device)
            plain, kept = list(range(watch.size)), [sample]
            if watch.has_numbers:
                other = (sample + 1) % watch.size
                orders = [
                    [other if swap and row == sample else source for row, source in enumerate(each)]
                    for each in (plain, self._exchanged(watch, sample))
                    for swap in (False, True)
                ]
            else:
                # Half of the rows: whom a sample meets, if any, may be in one row only.
                some = self._draws.sample(plain, max(1, watch.size // 2))
                kept, away = some[:_MOST_KEPT], self._exchanged(watch, None)
                orders = [plain, [row if row in {*some} else away[row] for row in plain]]
            outputs = []
            for each in orders:
                states.restore()
                outputs.append(self._outputs(watch, each))
            if not all(self._same_rows(watch, row, outputs) for row in kept):
                return Disagreement(
                    path="",
                    got="outputs that change once the other records of the batch are exchanged, "
                    "under the same random numbers",
                )
        return None

    def _outputs(self, watch: Watch, order: Sequence[int]) -> dict[int, Tensor]:
        args, kwargs = self._inputs.take(*watch.call, watch.size, order)
        with watch.autocast.again(), without_fast_attention(), torch.no_grad():
            found = tensors_in(self._model(*args, **kwargs))
        return {i: found[i] for i in watch.cotangents if i < len(found)}

    def _same_rows(self, watch: Watch, sample: int, outputs: list[dict[int, Tensor]]) -> bool:
        tolerance = self._tolerances(watch)[0]
        for place, first in outputs[0].items():
            if first.dim() == 0:
                a, b, c, d = (each[place].double() for each in outputs)
                most = max(float(x.abs()) for x in (a, b, c, d))
                if not float((a - b - c + d).abs()) <= tolerance * most:
                    return False
                continue
            readings = range(watch.num_readings)
            second = outputs[1].get(place)
            if second is None or first.shape != second.shape:
                continue
            if not any(_close(first, second, sample, watch.size, r, tolerance) for r in readings):
                return False
        return True

    # --- runs ------------------------------------------------------------------------------------

    def _exchanged(self, watch: Watch, sample: int | None) -> list[int]:
        """For every row another record of the batch; the sample, if any, stays in its own."""
        sources = watch.finite or list(range(watch.size))
        found = []
        for row in range(watch.size):
            others = [source for source in sources if source != row]
            found.append(row if row == sample or not others else self._draws.choice(others))
        return found

    def _run_elsewhere(self, watch: Watch, sample: int, reading: int) -> tuple[list[int], _Run]:
        """The sample among others; in another order, or as it was, if the model takes no others."""
        rest = [row for row in range(watch.size) if row != sample]
        shifted = dict(zip(rest, [*rest[1:], *rest[:1]], strict=True))
        moved = [shifted.get(row, row) for row in range(watch.size)]
        for order in (self._exchanged(watch, sample), moved):
            try:
                return order, self._run(watch, sample, order, reading)
            except torch.OutOfMemoryError:
                raise
            except (RuntimeError, ValueError, IndexError, TypeError, OtherOutputsError):
                continue
        as_it_was = list(range(watch.size))
        return as_it_was, self._run(watch, sample, as_it_was, reading)

    def _run(
        self,
        watch: Watch,
        sample: int,
        order: Sequence[int],
        reading: int,
        row: int | None = None,
    ) -> _Run:
        """One sample's gradient in the batch with its records in this `order`.

        The sample is in its own row, or in the one given.
        """
        row = sample if row is None else row
        call = self._inputs.take(*watch.call, watch.size, order)
        watch.states.restore()
        noted = DrawsNoted(watch.size)
        contexts: list[Any] = [watch.autocast.again(), noted]
        if watch.on_trial:
            contexts.append(dropout_silenced(self._model))
        rows: dict[int, Tensor] = {}

        def cotangents(outputs: Sequence[Tensor]) -> dict[int, Tensor]:
            found = cotangents_of(watch, sample, outputs, reading, row)
            rows.update({i: row_of(outputs[i].detach(), row, watch.size, reading) for i in found})
            return found

        found: Sketches = {}
        norms: Sketches = {}

        def take(name: str, grad: Tensor) -> None:
            found[name] = sketch(grad)
            # Without a copy in double precision: a table of words is large.
            norms[name] = torch.linalg.vector_norm(grad, dtype=torch.float64)

        if self._sharding is not None:
            contexts.append(self._sharding.gradients_to(take))
        grads = gradients_of(self._model, self._parameters, call, cotangents, contexts)
        self.besides_dropout = noted.besides_dropout or watch.states.host_has_moved()
        self.is_random = noted.any or self.besides_dropout
        found |= {name: sketch(grad) for name, grad in grads.items()}
        if grads:
            # One call for all of them: a model has hundreds.
            lengths = torch._foreach_norm([*grads.values()], 2, dtype=torch.float64)
            norms |= dict(zip(grads, lengths, strict=True))
        return _Run(grads=found, norm=length(norms), rows=rows)

    def _drew_other_numbers(self, watch: Watch, sample: int, run: _Run, reading: int) -> bool:
        """Whether the engine's forward gave the sample other outputs than the model does."""
        for place, row in run.rows.items():
            before = row_of(watch.outputs[place], sample, watch.size, reading)
            apart = float((row.double() - before.double()).norm())
            if before.shape == row.shape and apart > 0.05 * float(before.double().norm()):
                return True
        return False

    # --- how close -------------------------------------------------------------------------------

    def _judge(
        self, watch: Watch, one: Sketches, other: Sketches, slack: float, tolerance: float
    ) -> Disagreement | None:
        """How two gradients of the sample differ by more than rounding."""
        apart = distances(one, other)
        whole = max(length(one), length(other), _NEGLIGIBLE * watch.typical_norm)
        distance = sum(part * part for part in apart.values()) ** 0.5
        if distance <= tolerance * whole + slack:
            return None
        worst = max(apart, key=lambda name: apart[name])
        return Disagreement(
            path=self._path_of(worst),
            got=f"a gradient of {worst} that is {distance / max(whole, 1e-30):.1%} away",
        )

    def _judge_norms(
        self, watch: Watch, booked: float, norm: float, rounding: float
    ) -> Disagreement | None:
        tolerance = self._tolerances(watch)[1]
        low, high = (1 - tolerance) * norm, (1 + tolerance + _NORM_HEAD_ROOM) * norm
        slack = _NEGLIGIBLE * watch.typical_norm + rounding
        # Squares that cancel are rounded upwards, and their root shows it.
        upward = rounding / math.sqrt(self._smallest_step)
        if low - slack <= booked <= high + slack + upward:
            return None
        return Disagreement(path="", got=f"a norm of {booked:.6g} in the batch and {norm:.6g}")

    def _tolerances(self, watch: Watch) -> tuple[float, float]:
        """What rounding explains between two runs of one shape, and of what the engine books."""
        dtypes = {parameter.dtype for parameter in self._parameters.values()}
        if self._sharding is not None:
            dtypes |= self._sharding.computed_in
        if watch.autocast.enabled or dtypes & {torch.float16, torch.bfloat16}:
            return _HALF_TOLERANCES
        if torch.float32 in dtypes:
            lower = watch.autocast.device == "cuda" and torch.backends.cuda.matmul.allow_tf32
            return (_TF32_TOLERANCE,) * 2 if lower else (_TOLERANCE[torch.float32],) * 2
        return (_TOLERANCE[torch.float64],) * 2

    def _path_of(self, name: str) -> str:
        paths = [slot.path for slot in self._slots if name in slot.names.values()]
        return paths[0] if paths else name


def _minus(one: Sketches, two: Sketches, scale: float = 1.0) -> Sketches:
    """The difference of two gradients; what is missing is zero."""
    found = {name: scale * grad for name, grad in one.items()}
    for name, grad in two.items():
        found[name] = found[name] - scale * grad if name in found else -scale * grad
    return found


def _close(one: Tensor, two: Tensor, sample: int, size: int, reading: int, within: float) -> bool:
    a, b = (row_of(each, sample, size, reading).double() for each in (one, two))
    a, b = torch.nan_to_num(a), torch.nan_to_num(b)
    return float((a - b).norm()) <= within * float(a.norm()) + 1e-12
