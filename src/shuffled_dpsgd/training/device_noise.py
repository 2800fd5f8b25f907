"""Noise where the sums are: a kernel on a GPU, the core's definition everywhere else.

Both compute the same numbers from the same key, to rounding, and the referee recomputes some.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from shuffled_dpsgd.core.noise import ChaChaNoise, Place, check_sums
from shuffled_dpsgd.runtime.routes import took


class DeviceNoise:
    """Adds the noise of the core's definition, wherever each sum is."""

    def __init__(self) -> None:
        self._plain = ChaChaNoise()

    def add_(
        self,
        tensors: Mapping[str, torch.Tensor],
        stds: Mapping[str, float],
        *,
        key: bytes,
        places: Mapping[str, Place],
        divide_by: float,
    ) -> None:
        """Add N(0, stds[name]²) to every coordinate of every tensor, then divide."""
        check_sums(tensors, stds)
        took("noise", "chacha")
        self._plain.add_(tensors, stds, key=key, places=places, divide_by=divide_by)
