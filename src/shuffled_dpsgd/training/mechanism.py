"""One release of Algorithm 1: batch clip, noise, division, on sums of clipped gradients.

What holds: let every record's contribution to the sums have joint L2 norm at most `clip_norm`
(the clipping engine's law). The batch clip projects one block on a ball, and projections on
convex sets do not expand distances, so adding or removing one record still moves the sums by at
most `clip_norm` jointly. With noise of std `noise_multiplier * clip_norm` per block, the release
is at least as private as the Gaussian mechanism at the smallest of the blocks' noise multipliers.
Dividing by the expected batch size and permuting are post-processing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from shuffled_dpsgd.permutation import Permutation, apply_to_tensors
from shuffled_dpsgd.training.noise import NoiseSource
from shuffled_dpsgd.training.plan import NoiseBlock, PrivacyPlan


@dataclass(frozen=True, kw_only=True)
class BlockRelease:
    """What one block went through: norm of its sum before and after the batch clip, and noise."""

    name: str
    sum_norm: float
    batch_clip_factor: float
    noise_norm: float

    @property
    def signal_norm(self) -> float:
        """Norm of the sum that the noise was added to."""
        return self.sum_norm * self.batch_clip_factor


@dataclass(frozen=True, kw_only=True)
class Release:
    """The record of one release; its norms are computed from private data and not noised."""

    blocks: tuple[BlockRelease, ...]

    @property
    def signal_to_noise(self) -> float:
        """Norm of what was released over the expected norm of its noise."""
        noise = math.hypot(*(block.noise_norm for block in self.blocks))
        signal = math.hypot(*(block.signal_norm for block in self.blocks))
        return signal / noise if noise else math.inf


class Mechanism(Protocol):
    """Turns sums of clipped gradients into a private gradient, in place."""

    def privatize(
        self, sums: Mapping[str, torch.Tensor], *, step: int, frame: Permutation | None = None
    ) -> Release: ...


class ShuffledGaussianMechanism:
    """Algorithm 1's lines from the batch clip to the division, for the blocks of one plan."""

    def __init__(self, plan: PrivacyPlan, noise: NoiseSource) -> None:
        self._plan = plan
        self._noise = noise

    def privatize(
        self, sums: Mapping[str, torch.Tensor], *, step: int, frame: Permutation | None = None
    ) -> Release:
        """Make `sums` private in place.

        `frame` is the permutation the weights have undergone since the start. Given it, the noise
        is drawn for the weights as they would be had nothing ever been permuted: same
        distribution, and the same trajectory as an unshuffled run up to rounding. The sums are
        moved there and back rather than the noise, which would need a model-sized buffer.
        """
        blocks = tuple(self._clip(block, sums) for block in self._plan.blocks)
        stds = {
            name: block.noise_std(self._plan.clip_norm)
            for block in self._plan.blocks
            for name in block.parameters
        }
        if frame is not None:
            apply_to_tensors(frame.inverse(), sums)
        self._noise.add_(sums, {name: stds[name] for name in sums}, step=step)
        if frame is not None:
            apply_to_tensors(frame, sums)
        torch._foreach_div_(list(sums.values()), float(self._plan.expected_batch_size))
        return Release(blocks=blocks)

    def _clip(self, block: NoiseBlock, sums: Mapping[str, torch.Tensor]) -> BlockRelease:
        tensors = [sums[name] for name in block.parameters]
        norm = _joint_norm(tensors)
        factor = 1.0
        if block.batch_clip_norm is not None and norm > block.batch_clip_norm:
            factor = block.batch_clip_norm / norm
            torch._foreach_mul_(tensors, factor)
        return BlockRelease(
            name=block.name,
            sum_norm=norm,
            batch_clip_factor=factor,
            noise_norm=block.noise_std(self._plan.clip_norm) * math.sqrt(block.dimension),
        )


def _joint_norm(tensors: list[torch.Tensor]) -> float:
    if not tensors:
        return 0.0
    norms = torch._foreach_norm(tensors, 2, dtype=torch.float64)
    return float(torch.linalg.vector_norm(torch.stack(norms)))
