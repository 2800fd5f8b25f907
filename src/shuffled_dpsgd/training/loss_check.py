"""Does a record's loss depend on that record alone? Tried out by exchanging the others.

Every claim assumes it. A contrastive loss, a mean over the batch or over its tokens, weights by its
class counts, padding without a mask: in each, one record changes the losses or the gradients of
others, by more than the clip allows, and no norm shows it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.utils._pytree import tree_leaves

from shuffled_dpsgd.clipping.checks.check_turns import CheckTurns
from shuffled_dpsgd.clipping.checks.exchange import ExchangeTest, Moved, tolerance_for
from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.runtime.attention import same_attention, without_fast_attention
from shuffled_dpsgd.runtime.notices import say_once
from shuffled_dpsgd.runtime.output_tensors import tensors_in, with_tensors
from shuffled_dpsgd.runtime.random_states import RandomStates
from shuffled_dpsgd.runtime.replay import Call, Observed, Witness, some_entries, without_a_trace
from shuffled_dpsgd.training.data import Batch, shaped, to_device
from shuffled_dpsgd.training.label_check import labels_named
from shuffled_dpsgd.training.record_digest import shapes

PerSampleLoss = Callable[[nn.Module, Any], Tensor]
_TRIALS = 10
_MOST_ENTRIES = 1 << 12
# How far the loss trained on may be from the one handed over, relatively: at least, and under
# autocast, which the two may leave at different places.
_OTHER, _CAST = 5e-3, 0.05


@dataclass(frozen=True, kw_only=True)
class _Tried:
    """A batch as it was handed out, the random numbers then, and the model's latest call."""

    batch: Any
    states: RandomStates
    earlier: Call | None


class LossExchange:
    """Tries a loss out on batches of the run; `lifted` takes the engine off the model.

    Without `with_gradients` (weights spread over processes) the losses alone are compared. With a
    `witness` of what is trained on, that must be the same loss.
    `why_not_padding` says why records could not be collated with others, where they could not.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: PerSampleLoss,
        lifted: Callable[[], AbstractContextManager[None]],
        *,
        turns: CheckTurns,
        witness: Witness | None = None,
        with_gradients: bool = True,
    ) -> None:
        self.turns = turns
        self.why_not_padding = ""
        self._has_padded = False
        # Why what was trained on could not be compared with what was tried.
        self.why_not_compared: set[str] = set()
        self._tried: _Tried | None = None
        self._with_gradients = with_gradients
        self._witness = witness
        if witness is not None:
            witness.wants.append(lambda *_: self._tried is not None)
        self._model = model
        self._loss = loss
        self._lifted = lifted
        self._test = ExchangeTest(model, turns.draws)

    def check(self, batch: Any, rows: int, counted: int) -> None:
        """Try a batch of `rows` records, of which the first `counted` count.

        Raises:
            InvalidArgumentError: a loss changes with the other records.
        """
        self.note_unseen()
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
        if self._witness is not None:
            earlier, states = self._witness.call, RandomStates.of_model(self._model)
            self._tried = _Tried(batch=copy.copy(batch), states=states, earlier=earlier)

    def note_unseen(self) -> None:
        """A batch is over. Of one that was tried, a loss should have come to be compared."""
        if self._tried is not None:
            self._skip_comparison("a loss went backward by itself")
        self._tried = None

    def _skip_comparison(self, why: str) -> None:
        self.why_not_compared.add(why)
        say_once(f"loss= could not be compared with the loss trained on: {why}; the card says so")

    def compare(self, losses: Tensor) -> None:
        """Compare what a batch is trained on with the loss it was tried with: values and gradients.

        That is computed once more, under the random numbers that the loop has drawn since then.

        Raises:
            InvalidArgumentError: it is another loss.
        """
        tried, self._tried = self._tried, None
        if tried is None:
            return
        assert self._witness is not None, "tried so that it can be compared"
        now, call = tried.states.again().plain(), self._witness.call
        ends = self._witness.losses.ends
        if call is None or call is tried.earlier or not ends:
            self._skip_comparison("the model was not called in a way that could be followed")
            return
        with self._on_loan(same_attention(call.attention)), call.cast():
            tried.states.restore()
            outputs, inputs, expected = self._once_more(tried.batch)
            drawn = tried.states.again().plain()
        if drawn != now:
            self._skip_comparison("the loop and loss= draw other random numbers")
            return
        differ = _apart(call.outputs, {i: out.detach() for i, out in outputs.items()})
        given = [leaf for leaf in tree_leaves((call.args, call.kwargs)) if isinstance(leaf, Tensor)]
        same = len(given) == len(inputs) and all(map(torch.equal, given, inputs))
        allowed = _CAST if call.autocast[1] else max(_OTHER, 2.5 * tolerance_for(self._model))
        if same and differ > allowed:
            self._skip_comparison("the model gives something else when it is run once more")
            return
        expected = expected if losses.dim() else expected.mean()
        edges = [GradientEdge(*edge) for edge in ends]
        known: dict[str, Any] = {"retain_graph": True, "allow_unused": True}
        found = torch.autograd.grad(losses.sum(), edges, **known)
        mine = torch.autograd.grad(expected.sum(), [outputs[i] for i in ends.values()], **known)
        value = {0: losses.detach()}, {0: expected.detach()}
        apart = max(_apart(*value), _apart(dict(enumerate(found)), dict(enumerate(mine))))
        if apart > allowed:
            raise InvalidArgumentError(
                "loss",
                expected="the loss that private.backward is given, which is what loss= is tried "
                "out for, on batches as private.batches hands them out",
                got=f"losses, or gradients of them, that are {apart:.0%} away from those of loss=",
                remedy="hand over the function that the loop calls, with all that it does to a "
                "batch; or leave loss= out, and the card lists the loss as not checked",
            )

    def _once_more(self, batch: Any) -> tuple[dict[int, Tensor], list[Tensor], Tensor]:
        """The model's outputs, as leaves, its inputs, and the losses; only those have a graph."""
        outputs: dict[int, Tensor] = {}
        inputs: list[Tensor] = []

        def before(_: Any, args: Any, kwargs: Any) -> None:
            leaves = tree_leaves((args, kwargs))
            inputs[:] = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            torch.set_grad_enabled(False)

        def after(_: Any, args: Any, output: Any) -> Any:
            torch.set_grad_enabled(True)
            ends = enumerate(tensors_in(output))
            found = {i: out for i, out in ends if out.is_floating_point()}
            outputs.update({i: out.detach().clone().requires_grad_() for i, out in found.items()})
            return with_tensors(output, {id(out): outputs[i].clone() for i, out in found.items()})

        hooks = [
            self._model.register_forward_pre_hook(before, with_kwargs=True),
            self._model.register_forward_hook(after),
        ]
        try:
            with torch.enable_grad():
                return outputs, inputs, self._loss(self._model, batch)
        finally:
            for hook in hooks:
                hook.remove()

    def check_padding(self, samples: list[Any], collate: Callable[[list[Any]], Any]) -> None:
        """Once: collate two samples that pad each other anew, in evaluation mode.

        Raises:
            InvalidArgumentError: a loss changes with the other records.
        """
        alone = [shapes(collate(copy.deepcopy([sample]))) for sample in samples]
        if self._has_padded or all(each == alone[0] for each in alone):
            return
        self._has_padded = True
        # One of them is watched. If it is the shorter, the width changes with the other.
        samples = [samples[alone.index(each)] for each in (min(alone), max(alone))]
        device, rows = next(self._model.parameters()).device, range(len(samples))

        def observe(order: Sequence[int], kept: Sequence[int], gradients: bool) -> Observed:
            batch = collate(copy.deepcopy([samples[place] for place in order]))
            return self._observe(to_device(shaped(batch), device), kept, gradients)

        # In evaluation mode, cuDNN's recurrent layers have no backward.
        with self._on_loan(), torch.backends.cudnn.flags(enabled=False):
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
                    gradients=self._with_gradients,
                )
                for _ in range(_TRIALS)
            )
            found = next((change for change in trials if change is not None), None)
        if found is not None:
            raise _refusal(found)

    @contextmanager
    def _on_loan(self, attention: AbstractContextManager[None] | None = None) -> Iterator[None]:
        with (
            self.turns.time.spent(),
            labels_named(),
            self._lifted(),
            without_a_trace(self._model),
            attention or without_fast_attention(),
        ):
            yield

    def _observe(self, batch: Any, kept: Sequence[int], gradients: bool) -> Observed:
        """The losses of some records, or the one of the batch, and their gradients."""
        with torch.set_grad_enabled(gradients):
            losses = self._loss(self._model, batch)
        own = losses if losses.dim() == 0 else losses[list(kept)]
        value = own.detach() if own.dim() == 0 else own.detach().reshape(len(kept), -1)
        if not own.requires_grad:
            return Observed(values=[value], grads={})
        parameters = {n: p for n, p in self._model.named_parameters() if p.requires_grad}
        for parameter in parameters.values():
            parameter.grad = None
        own.sum().backward()
        grads = {n: p.grad for n, p in parameters.items() if p.grad is not None}
        return Observed(
            values=[value], grads={n: some_entries(g, _MOST_ENTRIES) for n, g in grads.items()}
        )


def _apart(found: Mapping[int, Any], expected: Mapping[int, Any]) -> float:
    """How far tensors are from others, relative to the larger; those that are missing are zero."""
    length = apart = 0.0
    for place in found.keys() & expected.keys():
        # Rows of a unit may have an axis of their own.
        flat = [t.double().reshape(-1) for t in (found[place], expected[place]) if t is not None]
        one, two = (*flat, *(torch.zeros_like(t) for t in flat), *[torch.zeros(1)] * 2)[:2]
        if one.shape != two.shape:
            return math.inf
        length += float(torch.stack([one.norm(), two.norm()]).max()) ** 2
        apart += float((one - two).norm()) ** 2
    return math.sqrt(apart / length) if length else 0.0


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
