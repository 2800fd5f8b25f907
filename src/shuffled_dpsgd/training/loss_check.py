"""The neighbour test of a loss: exchange the other records of a batch, and a loss must stay.

A mean over the batch, weights by its class counts, a softmax over its rows: in each, one record
changes the losses of others, also where no gradient shows it. So `loss(model, batch)` is computed
twice under the same states of all generators, with the engine off the model, once with the other
records exchanged. The loss of the watched record and its gradient must be the same.

Where the loss is one number for the batch, another record is put into the watched row, with the
others as they are and with the others exchanged: the loss must change by the same amount.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from shuffled_dpsgd.clipping.checks.check_turns import CheckTurns
from shuffled_dpsgd.clipping.checks.loss_independence import refuse_foreign_parameters
from shuffled_dpsgd.clipping.checks.random_states import (
    DrawsNoted,
    RandomStates,
    randomness_kept,
    seed_all,
)
from shuffled_dpsgd.clipping.checks.solo_runs import without_a_trace
from shuffled_dpsgd.clipping.rules.trial_runs import without_fast_attention
from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.training.data import Batch

PerSampleLoss = Callable[[nn.Module, Any], Tensor]
_SAMPLES = 2
# Of what happens in one batch of ten, 48 looks under other random numbers miss 0.6 %.
_FIRST_LOOKS, _MORE_LOOKS = 48, 4
_TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-3}
_HALF_TOLERANCE, _TF32_TOLERANCE = 5e-2, 1e-2


class LossExchange:
    """Tries a loss out on batches of the run; `lifted` takes the engine off the model.

    Without `with_gradients` (weights spread over processes) the losses alone are compared.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: PerSampleLoss,
        lifted: Callable[[], AbstractContextManager[None]],
        *,
        rate: float,
        with_gradients: bool = True,
    ) -> None:
        self.turns = CheckTurns(rate)
        self._model = model
        self._loss = loss
        self._lifted = lifted
        self._with_gradients = with_gradients
        self._draws = random.Random(2)
        self._is_first = True

    def check(self, batch: Any, rows: int, counted: int) -> None:
        """Try a batch of `rows` records, of which the first `counted` count.

        Raises:
            InvalidArgumentError: a loss changes with the other records.
            UnsupportedModuleError: the loss trains a parameter that is not the model's.
        """
        kind = rows.bit_length()
        if rows < 2 or counted < 1 or not self.turns.is_due(counted, kind):
            return
        started, is_new = time.perf_counter(), self.turns.is_new(kind)
        device = next(self._model.parameters()).device
        with (
            self._lifted(),
            randomness_kept(self._model, device),
            without_a_trace(self._model),
            without_fast_attention(),
        ):
            self._check(batch, rows, self._draws.sample(range(counted), min(_SAMPLES, counted)))
        self.turns.note_checked(kind, 1)
        if not is_new:
            self.turns.note_seconds(time.perf_counter() - started)

    def _check(self, batch: Any, rows: int, samples: Sequence[int]) -> None:
        device = next(self._model.parameters()).device
        states = RandomStates.now(self._model, device)
        noted = DrawsNoted(rows)
        with noted:
            for sample in samples:
                self._compare(batch, rows, sample, states, gradients=self._with_gradients)
        if not (noted.besides_dropout or states.host_has_moved()):
            return
        first, self._is_first = self._is_first, False
        for _ in range(_FIRST_LOOKS if first else _MORE_LOOKS):
            seed_all(self._draws.getrandbits(32))
            states = RandomStates.now(self._model, device)
            for sample in samples:
                self._compare(batch, rows, sample, states, gradients=False)

    def _compare(
        self, batch: Any, rows: int, sample: int, states: RandomStates, *, gradients: bool
    ) -> None:
        plain = list(range(rows))
        exchanged = [
            row if row == sample else self._draws.choice([r for r in plain if r != row])
            for row in plain
        ]
        is_number, found = False, []
        for order in (plain, exchanged):
            is_number, one = self._run(batch, rows, order, sample, states, gradients)
            if is_number:
                there = [(sample + 1) % rows if row == sample else s for row, s in enumerate(order)]
                two = self._run(batch, rows, there, sample, states, gradients)[1]
                one = [a - b for a, b in zip(one, two, strict=True)]
            found.append(one)
        tolerance = self._tolerance()
        norm = torch.stack([torch.linalg.vector_norm(x.double()) for x in found[0][1:]] or [_ZERO])
        whole = float(norm.norm())
        apart = [float((a.double() - b.double()).norm()) for a, b in zip(*found, strict=True)]
        value = max(float(found[0][0].abs().max()), 1e-3 if is_number else 0.0)
        same_loss = apart[0] <= tolerance * (value + 1e-6)
        same_gradient = sum(x * x for x in apart[1:]) ** 0.5 <= tolerance * whole + 1e-9
        unknown = not all(bool(torch.isfinite(x).all()) for pair in found for x in pair)
        if not unknown and not (same_loss and same_gradient):
            raise _refusal(sample, found[0][0], found[1][0], same_loss=same_loss)

    def _run(
        self,
        batch: Any,
        rows: int,
        order: Sequence[int],
        sample: int,
        states: RandomStates,
        gradients: bool,
    ) -> tuple[bool, list[Tensor]]:
        """The loss of the watched sample, or the one of the batch, and its gradient."""
        parameters = {n: p for n, p in self._model.named_parameters() if p.requires_grad}
        states.restore()
        for parameter in parameters.values():
            parameter.grad = None
        with torch.set_grad_enabled(gradients):
            losses = self._loss(self._model, taken(batch, order, rows))
            is_number = losses.dim() == 0
            own = losses if is_number else losses[sample]
            if not gradients:
                return is_number, [own.detach()]
            refuse_foreign_parameters(losses, parameters)
            own.backward()
        grads = [p.grad for p in parameters.values()]
        kept = [torch.zeros(()) if grad is None else grad for grad in grads]
        return is_number, [own.detach(), *kept]

    def _tolerance(self) -> float:
        device = next(self._model.parameters()).device
        types = {p.dtype for p in self._model.parameters() if p.is_floating_point()}
        lower = device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32
        least = _TF32_TOLERANCE if lower else 0.0
        return max(least, *(_TOLERANCE.get(dtype, _HALF_TOLERANCE) for dtype in types))


_ZERO = torch.zeros((), dtype=torch.float64)


def taken(batch: Any, order: Sequence[int], rows: int) -> Any:
    """The batch with these records, in everything that has one entry for each of `rows`."""
    if isinstance(batch, Tensor):
        has_rows = batch.dim() > 0 and batch.shape[0] == rows
        return batch[list(order)] if has_rows else batch
    if isinstance(batch, Mapping):
        found = {key: taken(value, order, rows) for key, value in batch.items()}
        return found if type(batch) is dict else type(batch)(found)  # type: ignore[call-arg]
    if isinstance(batch, Batch):
        return Batch(taken(value, order, rows) for value in batch)
    if isinstance(batch, list | tuple):
        if any(isinstance(value, Tensor | Mapping | list | tuple) for value in batch):
            return type(batch)(taken(value, order, rows) for value in batch)
        return type(batch)(batch[row] for row in order) if len(batch) == rows else batch
    return batch


def _refusal(sample: int, one: Tensor, other: Tensor, *, same_loss: bool) -> InvalidArgumentError:
    what = "gradient" if same_loss else "loss"
    return InvalidArgumentError(
        "per_sample_loss",
        expected="the loss of a record to be its own, whatever the other records of its batch are",
        got=f"a {what} of row {sample} that changes once the others are exchanged, under the same "
        f"random numbers: a loss of {float(one):.6g}, then of {float(other):.6g}",
        remedy="records must not see each other: average over a record's own tokens, weight by "
        "fixed class weights, mask padding, do not compare records",
    )
