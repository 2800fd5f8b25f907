"""Book-keeping during a backward: who records, when the backward is over, what must not happen.

The recorder is what slots see of the engine. It opens a `Batch` when the model is called, files
the entries of that batch as its backward runs, and asks autograd to call back at the end of it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from shuffled_dpsgd.clipping.batch import Batch, Entry
from shuffled_dpsgd.clipping.rules.base import Saved, Slot
from shuffled_dpsgd.errors import UnsupportedModuleError


class Recorder:
    """Files entries under the batch whose backward runs.

    `receive(batch, entry)` is called for every recorded call, `finish(batch)` once after the
    outermost backward. `batch` is the batch of the forward now running, else None.
    """

    def __init__(
        self, *, receive: Callable[[Batch, Entry], None], finish: Callable[[Batch], None]
    ) -> None:
        self.receive = receive
        self.finish = finish
        self.batch: Batch | None = None
        self.latest: Batch | None = None
        self._running: Batch | None = None

    def open(self, batch: Batch) -> None:
        """A forward of the model begins. What an interrupted backward left is dropped."""
        self._running = None
        self.batch = self.latest = batch

    def close_forward(self) -> None:
        """The forward is over; later calls of layers must be recomputations."""
        self.batch = None

    def recomputed_batch(self, path: str) -> Batch:
        """The batch a layer belongs to that is called outside the model's forward.

        That is right only inside a backward, where activation checkpointing calls layers again.
        Joining the backward that runs *now* keeps one batch in one piece even when re-entrant
        checkpointing nests a second backward inside it.
        """
        if torch._C._current_graph_task_id() < 0 or self.latest is None:
            raise UnsupportedModuleError(
                path,
                expected="layers called by the model's own forward",
                got="a call from outside it",
                remedy="call the model the engine was built on, or build the engine on a module "
                "whose forward does all that you need",
            )
        self._join(self.latest)
        return self.latest

    def record(self, batch: Batch, slot: Slot, saved: Saved) -> None:
        """File one call of one slot; called from the slot's backward."""
        if self._running is not batch:
            self._join(batch)
        self.receive(batch, Entry(slot, saved))

    def _join(self, batch: Batch) -> None:
        if self._running is batch:
            return
        if self._running is not None:
            raise UnsupportedModuleError(
                "",
                expected="one forward of the model per backward",
                got="a loss over several forwards",
                remedy="call backward after each forward (the sums add up), or let one module "
                "make both calls",
            )
        if batch.closed:
            raise UnsupportedModuleError(
                "",
                expected="one backward per forward",
                got="a second backward through the same forward",
                remedy="add the losses of one batch before calling backward; clipped one by one "
                "they would let a sample contribute more than clip_norm",
            )
        if torch.is_grad_enabled():
            raise UnsupportedModuleError(
                "",
                expected="a first-order backward",
                got="backward(create_graph=True)",
                remedy="per-sample clipping of higher derivatives is not supported",
            )
        self._running = batch
        torch.autograd.Variable._execution_engine.queue_callback(self._backward_done)  # type: ignore[no-untyped-call]

    def _backward_done(self) -> None:
        batch, self._running = self._running, None
        if batch is not None:
            try:
                self.finish(batch)
            finally:
                batch.entries.clear()
