"""A record as the canary of one step: its gradient goes through the run's own clipping.

Dropout makes the gradient of a record a random one. It is computed anew for every release, as in
training; the adversary, who knows record and weights, looks for the mean of draws of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import default_collate

from shuffled_dpsgd.auditing.adversaries import ThreatModel
from shuffled_dpsgd.auditing.model_attacks import inner
from shuffled_dpsgd.auditing.probes import Seen, Tensors
from shuffled_dpsgd.training.data import shaped, to_device
from shuffled_dpsgd.training.physical import PerSampleLoss
from shuffled_dpsgd.training.private import PrivateTraining

DRAWS = 32


class RecordGradient:
    """The clipped gradient of one record at the run's present weights, in units of the clip."""

    def __init__(
        self,
        private: PrivateTraining,
        record: Any,
        losses: PerSampleLoss,
        collate: Callable[[list[Any]], Any] | None,
    ) -> None:
        self._private = private
        self._losses = losses
        batch = (collate or default_collate)([record])
        self._batch = to_device(shaped(batch), private.device)

    def __call__(self) -> dict[str, torch.Tensor]:
        private = self._private
        with private:
            private.backward(self._losses(private.model, self._batch))
            sums = private.engine.clipped_sum()
            found = {name: tensor / private.plan.clip_norm for name, tensor in sums.items()}
            private.discard()
        return found


class ReadRecord:
    """Re-align, undo the update, and look for the record's gradient, blocks weighted by noise."""

    name = "re-alignment against W_t"
    threat_model = ThreatModel.ITERATES

    def __init__(self, private: PrivateTraining, gradient: RecordGradient, *, kind: str) -> None:
        self.canary_name = f"{kind} record"
        self._gradient = gradient
        mean = {name: tensor.double() / DRAWS for name, tensor in gradient().items()}
        for _ in range(DRAWS - 1):
            for name, tensor in gradient().items():
                mean[name].add_(tensor, alpha=1.0 / DRAWS)
        least = private.plan.smallest_noise_multiplier
        weight = {
            name: (least / block.noise_multiplier) ** 2 if least else 1.0
            for block in private.plan.blocks
            for name in block.parameters
        }
        self.canary: Tensors = {name: weight[name] * tensor for name, tensor in mean.items()}

    def contribution(self) -> Tensors:
        return self._gradient()

    def read(self, seen: Seen) -> float:
        return inner(self.canary, seen.from_iterates)
