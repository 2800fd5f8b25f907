"""The slow oracle of the tests: a batch given as single examples, clipped by the core's definition.

It shares no code with the engine, so that agreement between the two means something.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from shuffled_dpsgd.core.clip import PlainClipping


@dataclass(frozen=True, kw_only=True)
class ReferenceSum:
    """What the definition found: each sample's norm before clipping, and the clipped sum."""

    sample_norms: Tensor
    clipped_sum: dict[str, Tensor]


def clipped_sum_reference(
    model: nn.Module,
    per_example_loss_fn: Callable[[nn.Module, Any], Tensor],
    examples: Iterable[Any],
    clip_norm: float = 1.0,
    clip: str = "flat",
    groups: Sequence[Sequence[str]] | None = None,
) -> ReferenceSum:
    """The clipped sum of a batch given as single examples; what fast paths are compared with.

    `per_example_loss_fn` maps (model, example) to the scalar loss of that example. The model's
    `.grad` fields are left alone. A model that calls `backward()` inside its backward (Reformer's
    reversible layers) keeps gradients from us there.
    """
    sums = PlainClipping(model, clip_norm=clip_norm, clip=clip, groups=groups)
    for example in examples:
        sums.add(per_example_loss_fn(model, example))
    return ReferenceSum(sample_norms=sums.sample_norms, clipped_sum=sums.clipped_sum())
