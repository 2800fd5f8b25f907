"""One release of Algorithm 1: batch clip, noise, division, on sums of clipped gradients.

What holds: let every record's contribution to the sums have joint L2 norm at most `clip_norm`.
The batch clip projects one block on a ball, and projections on convex sets do not expand distances,
so adding or removing one record still moves the sums by at most `clip_norm` jointly. With noise of
std `noise_multiplier * clip_norm` per block, the release is at least as private as the Gaussian
mechanism at the smallest of the blocks' noise multipliers. Dividing by the expected batch size and
permuting are post-processing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass

import torch

from shuffled_dpsgd.core.banded import sensitivity
from shuffled_dpsgd.core.clip import joint_norm
from shuffled_dpsgd.core.noise import GaussianNoise, Place
from shuffled_dpsgd.core.plan import PrivacyPlan


@dataclass(eq=False)
class ShuffledGaussianMechanism:
    """Algorithm 1's lines from the batch clip to the division, for the blocks of one plan.

    Where the sums are one rank's share of them, `places` says which coordinates they are, and
    `total` adds up the squares of the shares' norms, one for each block, over all ranks.
    """

    plan: PrivacyPlan
    noise: GaussianNoise
    _: KW_ONLY
    places: Mapping[str, Place] | None = None
    total: Callable[[torch.Tensor], torch.Tensor] | None = None

    def __post_init__(self) -> None:
        rows = self.plan.noise_rows
        self._scale = sensitivity(rows) if rows else 1.0

    def _combined(self, keys: list[bytes]) -> list[tuple[float, bytes]]:
        """The draws that a step's noise is made of, each with its weight."""
        row = self.plan.noise_rows[len(keys) - 1] if self.plan.noise_rows else (1.0,)
        return [(self._scale * weight, key) for weight, key in zip(row, keys, strict=False)]

    def privatize(
        self,
        sums: Mapping[str, torch.Tensor],
        *,
        key: bytes,
        earlier: Sequence[bytes] = (),
    ) -> dict[str, torch.Tensor]:
        """Make `sums` private in place, with noise from `key` and those of `earlier` in its block.

        Returns the norm of each block of parameters before its batch clip: not noised, and on the
        device.
        """
        plan = self.plan
        norms = torch.stack([joint_norm([sums[n] for n in b.parameters]) for b in plan.blocks])
        if self.total is not None:
            norms = self.total(norms.square()).sqrt()
        before, stds = dict[str, torch.Tensor](), dict[str, float]()
        for block, norm in zip(plan.blocks, norms, strict=True):
            before[block.name] = norm
            stds |= dict.fromkeys(block.parameters, block.noise_std(plan.clip_norm))
            bound = block.batch_clip_norm
            if bound is not None:
                # On the device, so that it need not be waited for. Times one changes no bit.
                factor = torch.where(norm > bound, bound / norm, 1.0)
                for name in block.parameters:
                    sums[name].mul_(factor.to(sums[name].dtype))
        divide_by = float(plan.expected_batch_size)
        draws = self._combined([*earlier, key])
        for number_of, (weight, one) in enumerate(draws, start=1):
            own = {name: weight * stds[name] for name in sums}
            divisor = divide_by if number_of == len(draws) else 1.0
            self.noise.add_(sums, own, key=one, places=self.places, divide_by=divisor)
        return before
