"""Range checks that every audit setting makes on itself."""

from __future__ import annotations

from shuffled_dpsgd.errors import InvalidArgumentError


def require_positive(setting: object, *names: str) -> None:
    """Refuse a field that is not a positive number, by its name; nan is refused as well."""
    for name in names:
        if not getattr(setting, name) > 0.0:
            raise InvalidArgumentError(
                name, expected="a positive number", got=getattr(setting, name)
            )


def require_at_least(setting: object, **least: int) -> None:
    """Refuse a field below its limit, by its name."""
    for name, limit in least.items():
        if getattr(setting, name) < limit:
            raise InvalidArgumentError(
                name, expected=f"at least {limit}", got=getattr(setting, name)
            )
