"""A summary of the weights that ranks compare before every release."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from shuffled_dpsgd.distributed.world import World
from shuffled_dpsgd.runtime.shards import all_held, any_sharded
from shuffled_dpsgd.training.fingerprints import summary


class WeightSummary:
    """The weights' norms and sums, to the last bit.

    Where the weights lie on several ranks, the summary is of all of them, as last noted.
    """

    def __init__(self, world: World, trainable: Mapping[str, torch.Tensor]) -> None:
        self._world = world
        self._spread = world.size > 1 and any_sharded(trainable.values())
        self._trainable = trainable
        self._known = ""
        self.note()

    def note(self) -> None:
        """Take note of the weights as they are; collective where they lie on several ranks."""
        if self._spread:
            self._known = ":".join(self._world.gather(self._own()))

    def describe(self) -> str:
        """The summary as text; equal for equal weights."""
        return self._known if self._spread else self._own()

    def _own(self) -> str:
        return summary([part.detach() for part in all_held(self._trainable.values())])
