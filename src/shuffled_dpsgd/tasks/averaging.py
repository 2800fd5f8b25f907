"""An average of the weights along a run, which carries less noise than the last weights do.

Privacy costs nothing here: the average is a function of weights that were all released. Under a
shuffle the weights of different steps lie in different orders, so it is refused there.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

# Early on the average follows closely, so that it does not remember the start of the run.
_WARM_UP = 10


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
        decay = min(self._decay, (1 + self._steps) / (_WARM_UP + self._steps))
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
