"""One release of Algorithm 1: batch clip, noise, division, on sums of clipped gradients.

What holds: let every record's contribution to the sums have joint L2 norm at most `clip_norm`.
The batch clip projects one block on a ball, and projections on convex sets do not expand distances,
so adding or removing one record still moves the sums by at most `clip_norm` jointly. With noise of
std `noise_multiplier * clip_norm` per block, the release is at least as private as the Gaussian
mechanism at the smallest of the blocks' noise multipliers. Dividing by the expected batch size and
permuting are post-processing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Protocol

import torch

from shuffled_dpsgd.core.noise import GaussianNoise, Place, number
from shuffled_dpsgd.core.plan import PrivacyPlan

if TYPE_CHECKING:
    from shuffled_dpsgd.core.referee import Referee


class SumFrame(Protocol):
    """Where the noise is drawn: as if the weights had never been permuted (for experiments)."""

    def enter(self, sums: Mapping[str, torch.Tensor]) -> None:
        """Move the sums, in place, to where they would lie had nothing been permuted."""
        ...

    def leave(self, sums: Mapping[str, torch.Tensor]) -> None:
        """Move them back."""
        ...


class ShuffledGaussianMechanism:
    """Algorithm 1's lines from the batch clip to the division, for the blocks of one plan.

    Where the sums are one rank's share of them, `places` says which coordinates they are, and
    `total` adds up the squares of the shares' norms, one for each block, over all ranks.
    """

    def __init__(
        self,
        plan: PrivacyPlan,
        noise: GaussianNoise,
        *,
        places: Mapping[str, Place] | None = None,
        total: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        self._plan = plan
        self._noise = noise
        self._places = places
        self._total = total

    def privatize(
        self,
        sums: Mapping[str, torch.Tensor],
        *,
        key: bytes,
        frame: SumFrame | None = None,
        watch: Referee | None = None,
    ) -> dict[str, torch.Tensor]:
        """Make `sums` private in place, with noise from `key`."""
        plan = self._plan
        norms = torch.stack([joint_norm(sums[n] for n in b.parameters) for b in plan.blocks])
        if self._total is not None:
            norms = self._total(norms.square()).sqrt()
        before, stds = dict[str, torch.Tensor](), dict[str, float]()
        for block, norm in zip(plan.blocks, norms, strict=True):
            before[block.name] = norm
            stds |= dict.fromkeys(block.parameters, block.noise_std(plan.clip_norm))
            if block.batch_clip_norm is not None:
                # On the device, so that it need not be waited for. Times one changes no bit.
                factor = torch.where(
                    norm > block.batch_clip_norm, block.batch_clip_norm / norm, 1.0
                )
                for name in block.parameters:
                    sums[name].mul_(factor.to(sums[name].dtype))
        stds = {name: stds[name] for name in sums}
        places = number(sums) if self._places is None else self._places
        divide_by = float(plan.expected_batch_size)
        if frame is not None:
            frame.enter(sums)
        if watch is not None:
            watch.before_noise(sums)
        self._noise.add_(sums, stds, key=key, places=places, divide_by=divide_by)
        if watch is not None:
            watch.after_noise(sums, stds=stds, key=key, places=places, divide_by=divide_by)
        if frame is not None:
            frame.leave(sums)
        return before


def joint_norm(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """The L2 norm of all tensors as one vector, in double precision.

    `vector_norm` in float32 is off by a thousandth for long vectors on a CPU. Sums of squares by
    pieces are right to 1e-8 there.
    """
    flats = [tensor.detach().reshape(-1) for tensor in tensors if tensor.numel()]
    if not flats:
        return torch.zeros((), dtype=torch.float64)
    if any(flat.device.type != "cpu" for flat in flats):
        norms = torch._foreach_norm(flats, 2, dtype=torch.float64)
        return torch.linalg.vector_norm(torch.stack(norms))
    pieces = (piece for flat in flats for piece in flat.split(1 << 16))
    return torch.stack([piece.square().sum().double() for piece in pieces]).sum().sqrt()
