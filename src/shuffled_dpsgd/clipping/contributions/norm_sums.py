"""Norm layers whose per-sample sums are still to be made, so that many can share one launch.

Shapes: L layers, B samples, T positions, D the normalised width.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from shuffled_dpsgd.clipping import kernels


@dataclass(slots=True, eq=False, kw_only=True)
class UnsummedNorm:
    """Input and output gradient of a norm over the last axis whose sums are still to be made."""

    x_BTD: Tensor
    g_BTD: Tensor
    eps: float

    @property
    def nbytes(self) -> int:
        """Memory held until the sums are made."""
        return self.x_BTD.nbytes + self.g_BTD.nbytes

    @property
    def kind(self) -> Hashable:
        """All that the sums depend on besides the tensors."""
        return UnsummedNorm, self.eps

    def tensors(self) -> tuple[Tensor, ...]:
        """The captured tensors."""
        return self.x_BTD, self.g_BTD

    def move(self, places: Mapping[int, Tensor]) -> None:
        """Hold `places[id(tensor)]` instead of a tensor, for each that is there."""
        self.x_BTD = places.get(id(self.x_BTD), self.x_BTD)
        self.g_BTD = places.get(id(self.g_BTD), self.g_BTD)


def settle(pending: Sequence[UnsummedNorm]) -> list[tuple[list[int], Tensor]]:
    """Per-sample gradients of layer norms, those of one shape in one go.

    Each result names the positions in `pending` it is of and holds their (L, B, 2, D) gradients,
    the weight's before the bias's.
    """
    return kernels.norm_sum_runs(
        [(part.x_BTD, part.g_BTD) for part in pending],
        [part.eps for part in pending],
        [True] * len(pending),
    )
