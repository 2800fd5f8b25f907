"""What the engine accepts as arguments; anything else is refused by name."""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Real
from typing import Any

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
