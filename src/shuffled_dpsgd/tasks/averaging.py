"""An average of the weights along a run, which carries less noise than the last weights do.

Privacy costs nothing here: the average is a function of weights that were all released. Under a
shuffle the weights of different steps lie in different orders, so it is refused there.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from shuffled_dpsgd.runtime.shards import held

# Early on the average follows closely, so that it does not remember the start of the run.
_WARM_UP = 10


def _decay_at(step: int, most: float) -> float:
    return min(most, (1 + step) / (_WARM_UP + step))


class WeightAverage:
    """An exponential moving average of a model's floating-point weights, as a model of its own.

    The decay grows as (1 + t) / (10 + t) up to `decay`, so short runs are not held at their start.
    """

    def __init__(self, model: nn.Module, *, decay: float) -> None:
        self.model = copy.deepcopy(model)
        self._decay = decay
        self._steps = 0

    @torch.no_grad()
    def update(self, trained: nn.Module) -> None:
        """Take one more step's weights in; buffers are copied."""
        self._steps += 1
        decay = _decay_at(self._steps, self._decay)
        for mine, new in zip(self.model.parameters(), trained.parameters(), strict=True):
            mine.lerp_(new.to(mine.device), 1.0 - decay)
        for buffer, newer in zip(self.model.buffers(), trained.buffers(), strict=True):
            buffer.copy_(newer)

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"steps": self._steps, "model": self.model.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """From a checkpoint."""
        self._steps = int(state_dict["steps"])
        self.model.load_state_dict(state_dict["model"])


class ShardedAverage:
    """The same average of a model that is spread over ranks: each has that of its own rows."""

    def __init__(self, model: nn.Module, *, decay: float) -> None:
        self.weights = {name: p.detach().clone() for name, p in model.named_parameters()}
        self._decay = decay
        self._steps = 0

    @torch.no_grad()
    def update(self, trained: nn.Module) -> None:
        """Take one more step's weights in; nothing is sent."""
        self._steps += 1
        decay = _decay_at(self._steps, self._decay)
        for name, new in trained.named_parameters():
            held(self.weights[name]).lerp_(held(new), 1.0 - decay)

    @contextmanager
    def standing_in(self, model: nn.Module) -> Iterator[None]:
        """Inside, the model has the average for weights; afterwards its own again, to the bit."""
        self._change_places(model)
        try:
            yield
        finally:
            self._change_places(model)

    @torch.no_grad()
    def _change_places(self, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            mine, theirs = held(self.weights[name]), held(parameter)
            kept = theirs.clone()
            theirs.copy_(mine)
            mine.copy_(kept)

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint, which stores the rows of every rank."""
        return {"steps": self._steps, "model": dict(self.weights)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """From a checkpoint, which has read this rank's rows into their places already."""
        self._steps = int(state_dict["steps"])
