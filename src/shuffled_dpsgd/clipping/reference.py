"""The slow oracle: per-sample clipping one example at a time, with plain autograd.

Nothing here shares code with the engine, so that agreement between the two means something.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from shuffled_dpsgd.errors import InvalidArgumentError


@dataclass(frozen=True, kw_only=True)
class ReferenceSum:
    """What the oracle found: each sample's norm before clipping, and the clipped sum."""

    sample_norms: Tensor
    clipped_sum: dict[str, Tensor]


def clipped_sum_reference(
    model: nn.Module,
    per_example_loss_fn: Callable[[nn.Module, Any], Tensor],
    examples: Iterable[Any],
    clip_norm: float = 1.0,
    clip: str = "flat",
    groups: Iterable[Iterable[str]] | None = None,
) -> ReferenceSum:
    """Sum of clipped gradients, computed one example at a time.

    Args:
        model: Any model; its own `.grad` fields are left alone. One that calls `backward()`
            inside its backward (Reformer's reversible layers) keeps gradients from us there.
        per_example_loss_fn: (model, example) -> scalar loss of that single example.
        examples: The batch, as single examples.
        clip_norm: Bound on every example's contribution.
        clip: "flat", "automatic", "per-layer" or "none", as in `ClippingEngine`.
        groups: Parameter names clipped together under "per-layer", each to
            clip_norm / sqrt(number of groups).

    Examples whose gradient is not finite contribute zero.
    """
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    grouped = [list(named)] if clip != "per-layer" else [list(names) for names in groups or ()]
    if clip == "per-layer" and sorted(chain(*grouped)) != sorted(named):
        raise InvalidArgumentError(
            "groups", expected="every trainable parameter in one group", got=grouped
        )
    bound = clip_norm / math.sqrt(len(grouped))
    total = {name: torch.zeros_like(p) for name, p in named.items()}
    norms: list[Tensor] = []
    for example in examples:
        loss = per_example_loss_fn(model, example)
        found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
        grads = {n: g for n, g in zip(named, found, strict=True) if g is not None}
        norms.append(_norm(grads, named))
        for names in grouped:
            factor = _factor(_norm(grads, names), bound, clip)
            if factor > 0:
                for name in set(names) & set(grads):
                    total[name] += factor * grads[name]
    stacked = torch.stack(norms) if norms else torch.zeros(0)
    return ReferenceSum(sample_norms=stacked, clipped_sum=total)


def _norm(grads: dict[str, Tensor], names: Iterable[str]) -> Tensor:
    squares = [grads[name].square().sum() for name in names if name in grads]
    return torch.stack(squares).sum().sqrt() if squares else torch.zeros(())


def _factor(norm: Tensor, bound: float, clip: str) -> float:
    value = float(norm)
    if not math.isfinite(value):
        return 0.0
    if clip == "none":
        return 1.0
    if clip == "automatic":
        return bound / (value + 0.01)
    return min(1.0, bound / value) if value > 0 else 1.0
