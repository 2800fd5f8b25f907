"""Numbers of a configuration that must lie in a range."""

from __future__ import annotations

import math

from shuffled_dpsgd.errors import InvalidArgumentError


def check_range(
    name: str,
    value: float | None,
    low: float,
    *,
    below: float = math.inf,
    open_at_low: bool = False,
) -> None:
    """Refuse a number outside [low, below); None is the absence of one."""
    if value is None:
        return
    if not low <= value < below or (open_at_low and value == low):
        least = f"more than {low:g}" if open_at_low else f"at least {low:g}"
        most = "" if math.isinf(below) else f" and below {below:g}"
        finite = " and finite" if isinstance(value, float) and math.isinf(below) else ""
        raise InvalidArgumentError(name, expected=f"{least}{most}{finite}", got=value)
