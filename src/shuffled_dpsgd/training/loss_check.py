"""Does a record's loss depend on that record alone? Tried out by exchanging the others.

Every claim assumes it. A contrastive loss, a mean over the batch or over its tokens, weights by its
class counts, padding without a mask: in each, one record changes the losses or the gradients of
others, by more than the clip allows, and no norm shows it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from shuffled_dpsgd.clipping.checks.check_turns import CheckTurns
from shuffled_dpsgd.clipping.checks.exchange import ExchangeTest, Moved, tolerance_for
from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.runtime.attention import without_fast_attention
from shuffled_dpsgd.runtime.loss_graph import edge_of, refuse_foreign, walk_back
from shuffled_dpsgd.runtime.output_tensors import tensors_in
from shuffled_dpsgd.runtime.random_states import RandomStates
from shuffled_dpsgd.runtime.replay import Observed, some_entries, without_a_trace
from shuffled_dpsgd.training.data import Batch, shaped, to_device
from shuffled_dpsgd.training.label_check import labels_named
from shuffled_dpsgd.training.record_digest import shapes

PerSampleLoss = Callable[[nn.Module, Any], Tensor]
_TRIALS = 8
_MOST_ENTRIES = 1 << 12
# Relative to the largest loss; more than another precision does.
_OTHER_LOSS = 0.05


class LossExchange:
    """Tries a loss out on batches of the run; `lifted` takes the engine off the model.

    Without `with_gradients` (weights spread over processes) the losses alone are compared.
    `why_not_padding` says why records could not be collated with others, where they could not.
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
        self.why_not_padding = ""
        self._has_padded = False
        self._seen: tuple[list[int], Observed] | None = None
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
        with self._on_loan():
            found = self._test.find_change(
                lambda order, *kept: self._observe(taken(batch, order, rows), *kept),
                rows,
                sources=range(counted),
                states=RandomStates.of_model(self._model),
                tolerance=tolerance_for(self._model),
                is_new=self.turns.is_new(kind),
                up_to=self.turns.up_to,
                gradients=self._with_gradients,
            )
        if found is not None:
            raise _refusal(found)
        self.turns.note_checked(kind)
        self._seen = self._test.seen

    def compare(self, losses: Tensor) -> None:
        """Compare the losses that a batch is trained on with those it was just tried with.

        Where random numbers are drawn nobody can tell.

        Raises:
            InvalidArgumentError: they are others.
        """
        seen, self._seen = self._seen, None
        if seen is None:
            return
        kept, tried = seen
        found = losses.detach() if losses.dim() == 0 else losses.detach()[kept]
        expected = tried.values[0].reshape(found.shape).to(found)
        apart, size = (float(each.abs().max()) for each in (found - expected, expected))
        if apart > _OTHER_LOSS * size:
            raise InvalidArgumentError(
                "loss",
                expected="the loss that private.backward is given, which is what loss= is tried "
                "out for, on batches as private.batches hands them out",
                got=f"losses that are {apart / max(size, 1e-30):.0%} away from those of loss=",
                remedy="hand over the function that the loop calls, with all that it does to a "
                "batch; or leave loss= out, and the card lists the loss as not checked",
            )

    def check_padding(self, samples: list[Any], collate: Callable[[list[Any]], Any]) -> None:
        """Once: collate samples with others anew, in evaluation mode, if that pads them otherwise.

        Raises:
            InvalidArgumentError: a loss changes with the other records.
        """
        alone = [shapes(collate(copy.deepcopy([sample]))) for sample in samples]
        if self._has_padded or all(each == alone[0] for each in alone):
            return
        self._has_padded = True
        device, rows = next(self._model.parameters()).device, range(len(samples))

        def observe(order: Sequence[int], kept: Sequence[int], gradients: bool) -> Observed:
            batch = collate(copy.deepcopy([samples[place] for place in order]))
            return self._observe(to_device(shaped(batch), device), kept, gradients)

        with self._on_loan():
            self._model.eval()
            states = RandomStates.of_model(self._model)
            observe(rows, rows, False)
            if states.plain() != states.again().plain():
                self.why_not_padding = "numbers are drawn at random in evaluation mode"
                return
            trials = (
                self._test.find_change(
                    observe,
                    len(rows),
                    sources=rows,
                    states=states,
                    tolerance=tolerance_for(self._model),
                    gradients=False,
                )
                for _ in range(_TRIALS)
            )
            found = next((change for change in trials if change is not None), None)
        if found is not None:
            raise _refusal(found)

    @contextmanager
    def _on_loan(self) -> Iterator[None]:
        with (
            self.turns.time.spent(),
            labels_named(),
            self._lifted(),
            without_a_trace(self._model),
            without_fast_attention(),
        ):
            yield

    def _observe(self, batch: Any, kept: Sequence[int], gradients: bool) -> Observed:
        """The losses of some records, or the one of the batch, and their gradients."""
        outputs: list[Tensor] = []
        hook = self._model.register_forward_hook(lambda *got: outputs.extend(tensors_in(got[-1])))
        try:
            with torch.set_grad_enabled(gradients):
                losses = self._loss(self._model, batch)
        finally:
            hook.remove()
        own = losses if losses.dim() == 0 else losses[list(kept)]
        value = own.detach() if own.dim() == 0 else own.detach().reshape(len(kept), -1)
        if not own.requires_grad:
            return Observed(values=[value], grads={})
        parameters = {n: p for n, p in self._model.named_parameters() if p.requires_grad}
        found, leaves = walk_back(
            [edge_of(losses)], {edge_of(out) for out in outputs if out.requires_grad}
        )
        refuse_foreign(leaves if found else (), self._model.parameters(), where="loss")
        for parameter in parameters.values():
            parameter.grad = None
        own.sum().backward()
        grads = {n: p.grad for n, p in parameters.items() if p.grad is not None}
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
