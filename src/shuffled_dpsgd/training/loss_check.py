"""Does a record's loss depend on that record alone? Tried out by exchanging the others.

Every claim assumes it. A contrastive loss, a mean over the batch or over its tokens, weights by its
class counts, padding without a mask: in each, one record changes the losses or the gradients of
others, by more than the clip allows, and no norm shows it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from shuffled_dpsgd.clipping.checks.check_turns import CheckTurns
from shuffled_dpsgd.clipping.checks.exchange import ExchangeTest, Moved, tolerance_for
from shuffled_dpsgd.clipping.checks.loss_independence import refuse_foreign_parameters
from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.runtime.attention import without_fast_attention
from shuffled_dpsgd.runtime.random_states import RandomStates
from shuffled_dpsgd.runtime.replay import Observed, some_entries, without_a_trace
from shuffled_dpsgd.training.data import Batch, MapStyle, shaped, to_device
from shuffled_dpsgd.training.label_check import labels_named

PerSampleLoss = Callable[[nn.Module, Any], Tensor]
_RECORDS, _TRIALS = 4, 8
_MOST_ENTRIES = 1 << 12


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
        turns: CheckTurns,
        with_gradients: bool = True,
    ) -> None:
        self.turns = turns
        self._model = model
        self._loss = loss
        self._lifted = lifted
        self._with_gradients = with_gradients
        self._test = ExchangeTest(model, turns.draws)

    def check(self, batch: Any, rows: int, counted: int) -> None:
        """Try a batch of `rows` records, of which the first `counted` count.

        Raises:
            InvalidArgumentError: a loss changes with the other records.
            UnsupportedModuleError: the loss trains a parameter that is not the model's.
        """
        kind = rows.bit_length()
        if counted < 1 or not self.turns.is_due(kind):
            return
        with (
            self.turns.time.spent(),
            labels_named(),
            self._lifted(),
            without_a_trace(self._model),
            without_fast_attention(),
        ):
            found = self._test.find_change(
                lambda order, *kept: self._observe(taken(batch, order, rows), *kept),
                rows,
                sources=range(counted),
                states=RandomStates.of_model(self._model),
                tolerance=tolerance_for(self._model),
                is_new=self.turns.is_new(kind),
                thorough=self.turns.dense,
                gradients=self._with_gradients,
            )
        if found is not None:
            raise _refusal(found)
        self.turns.note_checked(kind)

    def _observe(self, batch: Any, kept: Sequence[int], gradients: bool) -> Observed:
        with torch.set_grad_enabled(gradients):
            return _observed(self._model, self._loss(self._model, batch), kept)


def check_independence(
    model: nn.Module,
    data: MapStyle,
    per_sample_loss: PerSampleLoss,
    *,
    collate: Callable[[list[Any]], Any] | None = None,
) -> None:
    """Compare the losses of the first records in batches with others.

    In evaluation mode batches are collated anew, so that others also change what records are padded
    to; in training mode they stay as they are. Nothing is released, and the model and all global
    generators are put back. Passing proves nothing about other records: it catches the mistakes
    that show everywhere. Batches of the run are tried out when they come.

    Raises:
        InvalidArgumentError: a loss changes with the company its record is in.
    """
    device = next(model.parameters()).device
    gather = collate or default_collate
    count = min(_RECORDS, len(data))

    def losses(order: Sequence[int], kept: Sequence[int], gradients: bool) -> Observed:
        batch = to_device(shaped(gather([records[place] for place in order])), device)
        with torch.set_grad_enabled(gradients):
            return _observed(model, per_sample_loss(model, batch), kept)

    with labels_named(), without_a_trace(model), without_fast_attention():
        records = [data[place] for place in range(count)]
        test = partial(
            ExchangeTest(model, random.Random(0)).find_change,
            rows=count,
            sources=range(count),
            tolerance=tolerance_for(model),
            gradients=False,
        )
        model.eval()
        states = RandomStates.of_model(model)
        losses(range(count), range(count), False)
        found = None
        if states.digest() == states.again().digest():
            trials = (test(losses, states=states) for _ in range(_TRIALS))
            found = next((change for change in trials if change is not None), None)
        model.train()
        whole = to_device(shaped(gather(list(records))), device)
        found = found or test(
            lambda order, kept, gradients: _observed(
                model, per_sample_loss(model, taken(whole, order, count)), kept
            ),
            states=RandomStates.of_model(model),
        )
    if found is not None:
        raise _refusal(found)


def _observed(model: nn.Module, losses: Tensor, kept: Sequence[int]) -> Observed:
    """The losses of some records, or the one of the batch, and their gradients."""
    parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
    own = losses if losses.dim() == 0 else losses[list(kept)]
    value = own.detach() if own.dim() == 0 else own.detach().reshape(len(kept), -1)
    if not own.requires_grad:
        return Observed(values=[value], grads={})
    for parameter in parameters.values():
        parameter.grad = None
    refuse_foreign_parameters(losses, parameters)
    own.sum().backward()
    grads = {name: p.grad for name, p in parameters.items() if p.grad is not None}
    return Observed(
        values=[value], grads={n: some_entries(g, _MOST_ENTRIES) for n, g in grads.items()}
    )


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


def _refusal(found: Moved) -> InvalidArgumentError:
    return InvalidArgumentError(
        "per_sample_loss",
        expected="the loss of a record to be its own, whatever the other records of its batch are",
        got=found.got,
        remedy="records must not see each other: average over a record's own tokens, weight by "
        "fixed class weights, mask padding, do not compare records",
    )
