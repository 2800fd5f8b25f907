"""Whether per-sample gradients found in one way add up to a batch's gradient found in another.

Equal outputs are not enough. Under vmap PyTorch ignores hooks on tensors, for example, and it
differentiates whatever it substitutes for an operation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

# What vmap ignores changes gradients by far more than rounding does.
_TOLERANCE = 1e-3
# How large rounding alone may make a zero gradient, relative to the weights of the outputs.
_FLOOR = 1e-3


def as_it_is(tensor: Tensor) -> Tensor:
    """Saves a tensor for the backward, or takes it back, as autograd does without hooks."""
    return tensor


def gradients(outputs: Sequence[Any], like: Sequence[Any], at: list[Tensor]) -> list[Tensor | None]:
    """Gradients of the sum of all outputs, expanded as in `like`, with fixed odd weights."""
    total = torch.zeros((), device=at[0].device)
    for output, wide in zip(outputs, like, strict=True):
        if isinstance(output, Tensor) and output.requires_grad and not output.is_complex():
            weights = torch.arange(wide.numel(), device=wide.device).double().cos().to(wide.dtype)
            total = total + (output.expand_as(wide) * weights.view(wide.shape)).sum()
    if not total.requires_grad:
        return [None] * len(at)
    return list(torch.autograd.grad(total, at, allow_unused=True))


def add_up(
    singles: Sequence[Tensor | None], whole: Sequence[Tensor | None], outputs: Sequence[Any]
) -> bool:
    """Whether per-sample gradients of `outputs` add up to those of the whole, up to rounding.

    Two cases pass unseen: half precision, whose rounding hides any difference, and samples whose
    gradients are not finite.
    """
    off = _length(
        [
            (0.0 if one is None else one.double().sum(0)) - (0.0 if other is None else other)
            for one, other in zip(singles, whole, strict=True)
        ]
    )
    tensors = [x for x in outputs if isinstance(x, Tensor)]
    weights = sum(x.numel() for x in tensors) ** 0.5
    coarse = any(
        x.dtype in (torch.float16, torch.bfloat16) or torch.is_autocast_enabled(x.device.type)
        for x in tensors
    )
    if coarse or not off < float("inf"):
        return True
    return off <= _TOLERANCE * (_length(whole) + _FLOOR * weights)


def _length(tensors: Sequence[Any]) -> float:
    found = [float(x.double().norm()) for x in tensors if isinstance(x, Tensor)]
    return sum(length**2 for length in found) ** 0.5
