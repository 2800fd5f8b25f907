"""Batches for a loop that asks for one step at a time, from worker processes that stay."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shuffled_dpsgd.training import PrivateTraining
from shuffled_dpsgd.training.drawn_batches import BatchStream


class WorkerBatches:
    """One stream over the rest of the plan, handed out step by step.

    A stream made anew for each step would start its workers anew as well. Steps of empty batches
    happen inside the stream, while it looks for the next batch: a turn of the loop that is already
    done then gets nothing, and the batch that was found waits for the turn it belongs to.
    """

    def __init__(self, private: PrivateTraining, stream: BatchStream) -> None:
        self._private = private
        self._stream = stream
        self._turn = private.steps_taken
        self._waiting: Any = None

    def of_next_step(self) -> Iterator[Any]:
        """The physical batches of one logical batch, which the caller ends with a step."""
        self._turn += 1
        while self._private.steps_taken < self._turn:
            batch = self._waiting if self._waiting is not None else next(self._stream, None)
            self._waiting = None
            if batch is None:
                return
            if self._private.steps_taken >= self._turn:
                self._waiting = batch
                return
            yield batch

    def close(self) -> None:
        """Let the workers go."""
        self._stream.close()
