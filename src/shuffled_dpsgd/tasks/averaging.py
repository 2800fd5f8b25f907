"""An average of the weights over a run, which has less noise than the last weights.

It costs no privacy, because it is a function of released weights. It is refused under a shuffle,
which orders the weights differently in every step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from shuffled_dpsgd.runtime.shards import held

# Early on the decay is small, so that the average forgets the initial weights.
_WARM_UP = 10


class WeightAverage:
    """An exponential moving average of a model's trainable weights.

    The decay grows as (1 + t) / (10 + t) up to `decay`. With sharded weights, each rank averages
    its own rows.
    """

    def __init__(self, model: nn.Module, *, decay: float) -> None:
        trained = ((name, p) for name, p in model.named_parameters() if p.requires_grad)
        self.weights = {name: p.detach().clone() for name, p in trained}
        self._decay = decay
        self._steps = 0

    @torch.no_grad()
    def update(self, trained: nn.Module) -> None:
        """Take one more step's weights in."""
        self._steps += 1
        decay = min(self._decay, (1 + self._steps) / (_WARM_UP + self._steps))
        for name, mine in self.weights.items():
            held(mine).lerp_(held(trained.get_parameter(name).detach()), 1.0 - decay)

    @contextmanager
    def standing_in(self, model: nn.Module) -> Iterator[None]:
        """Inside, the model has the average as its weights; its own are restored exactly."""
        self.change_places(model)
        try:
            yield
        finally:
            self.change_places(model)

    @torch.no_grad()
    def change_places(self, model: nn.Module) -> None:
        """Swap the model's weights and the average."""
        for name, mine in self.weights.items():
            theirs, ours = held(model.get_parameter(name)), held(mine)
            kept = theirs.clone()
            theirs.copy_(ours)
            ours.copy_(kept)

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint, which stores the rows of every rank."""
        return {"steps": self._steps, "model": dict(self.weights)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """From a checkpoint, which has filled the tensors of a sharded model already."""
        self._steps = int(state_dict["steps"])
        for name, kept in state_dict["model"].items():
            if kept is not self.weights[name]:
                self.weights[name].copy_(kept)
