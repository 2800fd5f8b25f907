"""Several processes as one run: the ranks, what they agree on, how their sums are joined."""

from __future__ import annotations

from shuffled_dpsgd.distributed.launch import launched
from shuffled_dpsgd.distributed.world import World, current_world

__all__ = ["World", "current_world", "launched"]
