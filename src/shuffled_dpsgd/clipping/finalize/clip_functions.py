"""Clip functions: per-sample norms in, per-sample factors out.

Every function returns a factor f with f·norm <= clip_norm, up to the rounding that `margin`
absorbs. The exception is `none`, which returns one. A sample whose norm is not finite gets zero.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

ClipFunction = Callable[[Tensor, float], Tensor]

STABILITY = 0.01
_MARGIN_ULPS = 6.0


def margin(dtype: torch.dtype) -> float:
    """Relative head room for the rounding of norms and sums: about 7e-7 in float32."""
    return _MARGIN_ULPS * torch.finfo(dtype).eps


def flat(norms_B: Tensor, clip_norm: float) -> Tensor:
    """min(1, clip_norm / norm), Abadi et al. 2016."""
    bound = clip_norm * (1.0 - margin(norms_B.dtype))
    return _finite(norms_B, bound / norms_B.clamp(min=bound))


def automatic(norms_B: Tensor, clip_norm: float) -> Tensor:
    """clip_norm / (norm + 0.01), the normalisation of Bu et al. 2022 (AUTO-S)."""
    bound = clip_norm * (1.0 - margin(norms_B.dtype))
    return _finite(norms_B, bound / (norms_B + STABILITY))


def none(norms_B: Tensor, clip_norm: float) -> Tensor:
    """One for every finite sample: no clipping, hence no privacy."""
    return _finite(norms_B, torch.ones_like(norms_B))


def _finite(norms_B: Tensor, factors_B: Tensor) -> Tensor:
    return torch.where(torch.isfinite(norms_B), factors_B, 0.0)


# Per-layer clipping applies the flat function to each of its groups.
CLIP_FUNCTIONS: dict[str, ClipFunction] = {
    "flat": flat,
    "automatic": automatic,
    "per-layer": flat,
    "none": none,
}
