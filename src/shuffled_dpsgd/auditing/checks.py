"""What checks report that need no statistics of an attack."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Check:
    """What was measured against what is allowed; `passed` is their comparison, nothing else."""

    name: str
    measured: float
    allowed: float
    detail: str = ""

    @property
    def passed(self) -> bool:
        """False also for a measurement that is not a number."""
        return self.measured <= self.allowed

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "passed": self.passed}


@dataclass(frozen=True, kw_only=True)
class CheckReport:
    """Several checks of one thing."""

    unit: str
    setting: Mapping[str, Any]
    checks: tuple[Check, ...]
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

    @property
    def failed(self) -> tuple[str, ...]:
        """Names of the checks that do not hold."""
        return tuple(check.name for check in self.checks if not check.passed)

    def to_json(self) -> dict[str, Any]:
        checks = [check.to_json() for check in self.checks]
        return {**asdict(self), "passed": self.passed, "checks": checks}
