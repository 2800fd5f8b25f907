"""The only place where noise is drawn.

Gaussian noise is added to a tensor in place, through a scratch buffer of bounded size, in float32
or better: never in bfloat16, whose eight bits would let the noisy sum betray the sum it hides.

On the CPU the draw is numpy's ziggurat, whose tail is exact; torch's float32 Box-Muller there
never exceeds 5.8 standard deviations, which a model of 1e8 coordinates would notice. Floating
point noise of any kind is not the real-valued Gaussian of the theorems: an adversary who reads
every low-order bit of a released sum is outside the model (Mironov 2012).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.training.randomness import RandomStreams

_SCRATCH_ELEMENTS_CPU = 1 << 18
_SCRATCH_ELEMENTS_ACCELERATOR = 1 << 24
_WIDE = (torch.float32, torch.float64)


class NoiseSource(Protocol):
    """Adds noise to named tensors in place."""

    def add_(
        self, tensors: Mapping[str, torch.Tensor], stds: Mapping[str, float], *, step: int
    ) -> None: ...


class GaussianNoise:
    """Independent Gaussian noise for every coordinate, from the run's own streams.

    The stream of a tensor is keyed by (run, step, its position among all the names given), so
    what a tensor receives does not depend on how the others are sized or split.
    """

    def __init__(self, streams: RandomStreams) -> None:
        self._streams = streams

    def add_(
        self, tensors: Mapping[str, torch.Tensor], stds: Mapping[str, float], *, step: int
    ) -> None:
        """Add N(0, stds[name]²) to every coordinate of every tensor; a std of 0 adds nothing."""
        if set(tensors) != set(stds):
            missing = sorted(set(tensors) ^ set(stds))
            raise InvalidArgumentError(
                "stds", expected="one standard deviation per tensor", got=f"mismatch at {missing}"
            )
        for index, (name, tensor) in enumerate(tensors.items()):
            self._add_one(name, tensor, stds[name], step=step, index=index)

    def _add_one(
        self, name: str, tensor: torch.Tensor, std: float, *, step: int, index: int
    ) -> None:
        if std == 0.0:
            return
        if tensor.dtype not in _WIDE or not tensor.is_contiguous():
            raise InvalidArgumentError(
                name, expected="a contiguous float32 or float64 sum", got=tensor.dtype
            )
        flat = tensor.view(-1)
        if tensor.device.type == "cpu":
            self._add_on_cpu(flat, std, step=step, index=index)
        else:
            self._add_on_accelerator(flat, std, step=step, index=index)

    def _add_on_cpu(self, flat: torch.Tensor, std: float, *, step: int, index: int) -> None:
        rng = self._streams.numpy("noise", step, index)
        scratch = torch.empty(min(flat.numel(), _SCRATCH_ELEMENTS_CPU), dtype=flat.dtype)
        for part in flat.split(_SCRATCH_ELEMENTS_CPU):
            draw = scratch[: part.numel()]
            rng.standard_normal(out=draw.numpy(), dtype=draw.numpy().dtype)
            part.add_(draw, alpha=std)

    def _add_on_accelerator(self, flat: torch.Tensor, std: float, *, step: int, index: int) -> None:
        generator = self._streams.torch("noise", step, index, device=flat.device)
        size = min(flat.numel(), _SCRATCH_ELEMENTS_ACCELERATOR)
        scratch = torch.empty(size, dtype=flat.dtype, device=flat.device)
        for part in flat.split(_SCRATCH_ELEMENTS_ACCELERATOR):
            draw = scratch[: part.numel()]
            draw.normal_(generator=generator)
            part.add_(draw, alpha=std)
