"""The neighbour tests of a run: does its loader or its loss mix records of a batch?

Every batch is tested until the first release, so that mixing is found before anything is released.
After that, every new kind of batch is tested, and others at random. The engine tests the model.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.utils.data import default_collate

from shuffled_dpsgd.clipping.checks.check_turns import CheckTurns, TimeShare
from shuffled_dpsgd.runtime.notices import say_once
from shuffled_dpsgd.training.data import MapStyle, PartLoader, PhysicalBatch
from shuffled_dpsgd.training.label_check import LabelCheck
from shuffled_dpsgd.training.loader_check import LoaderCheck
from shuffled_dpsgd.training.loss_check import LossExchange, PerSampleLoss

if TYPE_CHECKING:
    from shuffled_dpsgd.training.private import PrivateTraining

# In standard deviations of a Poisson number, which is hardly ever larger.
_MANY_DEVIATIONS = 5
NO_LOSS = (
    "not checked: that the loss of a record does not depend on the others of its batch, through "
    "the loss or through what the loop does to the batch (make_private was given no loss=)"
)


class NeighbourTests:
    """Tries out the loader and the loss of `run` on the batches it draws.

    `check_time` is what all checks of the run have taken.
    """

    def __init__(self, run: PrivateTraining, *, rate: float, check_time: TimeShare) -> None:
        self._run = run
        self._turns = partial(CheckTurns, rate, check_time, run.plan.seed)
        self._loader: LoaderCheck | None = None
        self._loss: LossExchange | None = None
        self._made_of: tuple[Any, Any, bool] | None = None
        self._labels = LabelCheck(run.model)
        # The number of releases when a batch was last tested.
        self._tried_at = 0

    def use_loss(self, loss: PerSampleLoss, *, is_trained_on: bool) -> None:
        """Test this loss from here on and, unless `is_trained_on`, that it is the loss in use."""
        turns = self._turns()
        if self._run.is_split:
            # All ranks run the model together: none may choose by time or by a coin of its own.
            turns = CheckTurns(0.0, turns.time, 0)
        self._loss = LossExchange(
            self._run.model,
            loss,
            self._run.engine.lifted,
            turns=turns,
            witness=None if is_trained_on or self._run.is_sharded else self._run.witness,
            with_gradients=not self._run.is_sharded,
        )
        if self._run.is_split:
            self._loss.why_not_padding = "layers are split over processes"
        if self._run.is_sharded and not is_trained_on:
            self._loss.why_not_compared.add("weights are spread over processes")

    def use_loader(
        self, data: MapStyle, collate: Callable[[list[Any]], Any] | None, *, in_worker: bool
    ) -> None:
        """Test what loads and collates from here on, `in_worker` processes or in this one."""
        made_of = data, collate, in_worker
        if self._made_of is not None and all(map(operator.is_, self._made_of, made_of)):
            return
        self._made_of = made_of
        loader = PartLoader(data, collate or default_collate)
        self._labels.stop()
        self._labels = LabelCheck(self._run.model, self._run.rows)
        self._loader = LoaderCheck(
            loader, dataset_size=len(data), turns=self._turns(), in_worker=in_worker
        )

    @property
    def _largest(self) -> int:
        """Rows of physical batches that are as large as they are likely to come."""
        run, expected = self._run, self._run.plan.expected_batch_size
        drawn = expected + math.ceil(_MANY_DEVIATIONS * math.sqrt(expected))
        return min(run.physical_batch_size, run.plan.dataset_size, drawn)

    @property
    def not_checked(self) -> tuple[str, ...]:
        """What was not tested, which the card lists among the assumptions."""
        reasons = [] if self._loss is not None else [NO_LOSS]
        if self._loss is not None and self._run.ledger.spent > self._tried_at:
            self._loss.note_unseen()
        if self._loss is not None and self._loss.why_not_padding:
            reasons.append(
                "not checked: that the loss of a record does not depend on what it is padded to "
                f"({self._loss.why_not_padding})"
            )
        if self._loss is not None and self._loss.why_not_compared:
            reasons.append(
                "not checked: that the loss trained on is the one handed over, whose records are "
                f"tried ({'; '.join(sorted(self._loss.why_not_compared))})"
            )
        reasons += [] if self._loader is None else self._loader.not_checked
        return tuple(reasons)

    def close(self) -> None:
        """Remove all hooks from the model."""
        self._labels.stop()

    def check_losses(self, losses: Tensor) -> None:
        """Refuse losses of another function than was tried, and labels that are no class."""
        if self._loss is not None:
            self._loss.compare(losses)
        if self._run.ledger.spent == 0:
            self._labels.learn(losses)

    def check(self, drawn: PhysicalBatch, batch: Any) -> None:
        """Try out a batch that is about to be handed out, if its turn has come."""
        run = self._run
        if drawn.size:
            self._labels.check(drawn.data, drawn.part.records)
        if run.ledger.spent == 0:
            self._labels.watch(batch, drawn.part.records)
        else:
            self._labels.stop()
        up_to = self._largest if run.ledger.spent == 0 else 0
        # Where the loss is at hand, it is tried with the model.
        run.engine.check_densely(up_to if self._loss is None else 0)
        with run.clock.part("checks"):
            if self._loader is not None and drawn.size:
                self._loader.turns.up_to = up_to
                self._loader.check(drawn.part)
            self._check_loss(drawn, batch, up_to)

    def _check_loss(self, drawn: PhysicalBatch, batch: Any, up_to: int) -> None:
        if self._loss is None:
            say_once(
                "the loss is not checked: pass make_private(loss=f), where f(model, batch) returns "
                "one loss per record, and the first batches are used to try it out; the card lists "
                "it as not checked"
            )
        elif not self._run.keeps_in_step:
            self._loss.turns.up_to = up_to
            self._try_loss(self._loss, drawn, batch)
        elif up_to:
            # All ranks have as many batches, and those in which nothing counts lend weights.
            with self._run.unsharded_layers():
                self._try_loss(self._loss, drawn, batch)

    def _try_loss(self, loss: LossExchange, drawn: PhysicalBatch, batch: Any) -> None:
        self._tried_at = self._run.ledger.spent
        first = self._tried_at == 0 and not self._run.is_split
        if self._loader is not None and drawn.size and first:
            loss.check_padding(self._loader.some_samples(drawn.part), self._loader.collate)
        loss.check(batch, drawn.rows, drawn.size * drawn.part.rows_per_sample)
