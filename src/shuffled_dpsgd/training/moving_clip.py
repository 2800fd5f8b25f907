"""A clip norm that changes during a run: by a public schedule, or following the gradient norms.

The plan's C stays. Losses are divided by a level before the backward, so that a gradient is clipped
at level · C, and the private gradient is multiplied by the level afterwards. The level is public
before a step begins: the user sets it, or it was computed from earlier releases. So every step is
the mechanism that the plan prices, whatever the level, and ε is the same as with a fixed clip.

With `clip_quantile` the level follows the norms (Andrew et al., 2021). Each record adds one more
coordinate: +s if its norm is below the clip, -s if not. Its gradient is clipped to sqrt(C² - s²),
so that both together have a norm of C at most. The coordinate is released with the gradient and
its noise, and says which share of the records is below the clip.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

import torch

from shuffled_dpsgd.clipping.arguments import require_positive
from shuffled_dpsgd.core.clip import ClippedSums
from shuffled_dpsgd.core.plan import PrivacyPlan
from shuffled_dpsgd.core.referee import Referee
from shuffled_dpsgd.errors import InvalidArgumentError

COORDINATE = "(share of records below the clip)"
# Andrew et al. add noise of a twentieth of the batch to the count, and learn at rate 0.2.
_NOISE_OF_SHARE = 0.05
_RATE = 0.2
_LARGEST_SHARE = 0.3


def coordinate_share(plan: PrivacyPlan) -> float:
    """s / C: the part of C that a record uses for the coordinate; 0 unless the clip follows norms.

    As large as the count needs for noise of a twentieth of the batch, and 0.3 at most, which
    leaves 0.95 of C to the gradient.
    """
    if plan.clip_quantile is None:
        return 0.0
    wanted = plan.smallest_noise_multiplier / (2 * _NOISE_OF_SHARE * plan.expected_batch_size)
    return min(max(wanted, 0.01), _LARGEST_SHARE)


def gradient_clip(plan: PrivacyPlan) -> float:
    """The clip of the gradients: what the coordinate leaves of C."""
    return plan.clip_norm * math.sqrt(1.0 - coordinate_share(plan) ** 2)


def follows(plan: PrivacyPlan) -> str:
    """The line of a card about a clip that follows the norms."""
    return (
        f"the clip starts at {gradient_clip(plan):.4g} and follows the norms, so that "
        f"{plan.clip_quantile:.0%} of the records are below it; their number is released with the "
        "gradient, within the clip"
    )


class MovingClip:
    """The level of one run."""

    def __init__(self, plan: PrivacyPlan) -> None:
        self.level = 1.0
        self._plan = plan
        self._share = coordinate_share(plan)
        self._rows = 0

    @property
    def names(self) -> tuple[str, ...]:
        """What is released besides the parameters' gradients."""
        return (COORDINATE,) if self._share else ()

    @property
    def clip_norm(self) -> float:
        """The present clip norm of a gradient."""
        return self.level * gradient_clip(self._plan)

    def set(self, clip_norm: float) -> None:
        """Use this clip norm from the next step on.

        Raises:
            InvalidArgumentError: the clip follows the norms, or a step has begun.
        """
        require_positive("clip_norm", clip_norm)
        fixed = self._plan.bands > 1 or not math.isfinite(self._plan.clip_norm)
        if self._share or self._rows or fixed:
            got = "clip_quantile" if self._share else "a step that has begun"
            got = "banded noise, or no clip" if fixed else got
            raise InvalidArgumentError(
                "clip_norm", expected="a clip that is yours to set, between two steps", got=got
            )
        self.level = clip_norm / self._plan.clip_norm

    def scaled(self, losses: torch.Tensor, rows: int) -> torch.Tensor:
        """The losses of `rows` records, divided by the level."""
        self._rows += rows
        return losses if self.level == 1.0 else losses / self.level

    def forget(self) -> None:
        """Forget the records of the step, which begins again."""
        self._rows = 0

    def counted(self, engine: ClippedSums) -> ClippedSums:
        """The engine, with the coordinate among its sums.

        Raises:
            InvalidArgumentError: losses went backward that were not scaled.
        """
        if engine.sample_norms.numel() != self._rows and (self._share or self.level != 1.0):
            raise InvalidArgumentError(
                "losses",
                expected="private.backward(losses), which knows the clip of this step",
                got="losses.sum().backward()",
            )
        return cast(ClippedSums, _Counted(engine, self._plan)) if self._share else engine

    def watched(self, referee: Referee) -> Referee:
        """The referee, whose bound is for gradients alone, looking at both together."""
        return cast(Referee, _JointBound(referee, self._plan)) if self._share else referee

    def taken(self, released: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """The private gradients as the optimizer takes them; moves the clip for the next step."""
        grads = {name: grad for name, grad in released.items() if name != COORDINATE}
        if self.level != 1.0:
            for grad in grads.values():
                grad.mul_(self.level)
        if self._share:
            found = float(released[COORDINATE]) / (self._share * self._plan.clip_norm)
            below = min(max((1.0 + found) / 2.0, 0.0), 1.0)
            assert self._plan.clip_quantile is not None
            self.level *= math.exp(-_RATE * (below - self._plan.clip_quantile))
        return grads


class _Counted:
    def __init__(self, engine: ClippedSums, plan: PrivacyPlan) -> None:
        self._engine, self._plan = engine, plan

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def clipped_sum(self) -> dict[str, torch.Tensor]:
        sums = dict(self._engine.clipped_sum())
        like = next(iter(sums.values()))
        # A gradient that is not finite is above every clip.
        below = (self._engine.sample_norms <= gradient_clip(self._plan)).double()
        size = coordinate_share(self._plan) * self._plan.clip_norm
        sums[COORDINATE] = (size * (2.0 * below - 1.0).sum()).to(like).reshape(1)
        return sums


class _JointBound:
    def __init__(self, referee: Referee, plan: PrivacyPlan) -> None:
        self._referee = referee
        self._part = gradient_clip(plan) / plan.clip_norm

    def __getattr__(self, name: str) -> Any:
        return getattr(self._referee, name)

    def inspect(self, sums: Any, *, norm: float, count: int, drawn: int) -> None:
        self._referee.inspect(sums, norm=norm * self._part, count=count, drawn=drawn)

    def check_bound(self, norm: float, *, count: int) -> None:
        self._referee.check_bound(norm * self._part, count=count)
