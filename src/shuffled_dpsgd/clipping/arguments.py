"""What the engine accepts as arguments; anything else is refused by name."""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Real
from typing import Any

from torch import Tensor

from shuffled_dpsgd.clipping.capture.batch import CapturedBatch
from shuffled_dpsgd.errors import InvalidArgumentError


def require_choice(argument: str, value: str, allowed: Iterable[str]) -> None:
    """One of the values that are allowed."""
    if value not in tuple(allowed):
        raise InvalidArgumentError(argument, expected=f"one of {tuple(allowed)}", got=value)


def require_positive(argument: str, value: Any) -> float:
    """A finite number above zero."""
    if not isinstance(value, Real) or not 0 < float(value) < float("inf"):
        raise InvalidArgumentError(argument, expected="a positive number", got=value)
    return float(value)


def require_share(argument: str, value: Any) -> float:
    """A number from zero to one."""
    if not isinstance(value, Real) or not 0 <= float(value) <= 1:
        raise InvalidArgumentError(argument, expected="a number from 0 to 1", got=value)
    return float(value)


def require_losses(
    losses: Tensor, batch: CapturedBatch | None, counted: int | None, *, any_count: bool
) -> CapturedBatch:
    """One loss per sample; the first `counted` count, at least one of them if `any_count`."""
    if batch is None:
        raise InvalidArgumentError(
            "losses",
            expected="losses of a forward that the engine has seen",
            got="no forward at all",
            remedy="draw the batches of a private run from private.batches(data); with an engine "
            "alone, run forward and backward inside `with engine:`",
        )
    if losses.shape != (batch.size,):
        raise InvalidArgumentError(
            "losses",
            expected=f"one loss per sample, shape ({batch.size},)",
            got=tuple(losses.shape),
            remedy="reduce over positions, not over samples",
        )
    least = 1 if any_count else 0
    if counted is not None and not least <= counted <= max(batch.size, 1):
        raise InvalidArgumentError(
            "counted", expected=f"a number of samples from {least} to {batch.size}", got=counted
        )
    if batch.size > 0 and not losses.requires_grad:
        raise InvalidArgumentError(
            "losses",
            expected="losses computed from trainable parameters with gradients enabled",
            got="losses without a gradient",
            remedy="compute them outside no_grad; merged adapters are not trained",
        )
    return batch
