"""Nobody at the door: for audits that plant canaries, or faults, in what is released."""

from __future__ import annotations

from typing import Any

from shuffled_dpsgd.core.referee import Checks


class Unwatched:
    """Takes the referee's place and looks at nothing; its counts stay zero, and the card shows it.

    A canary that is added to the sums is what the referee exists to stop.
    """

    def __init__(self) -> None:
        self.checks = Checks()

    def begin_step(self) -> None:
        """Nothing is kept of a step."""

    def inspect(self, sums: Any, *, norm: float | None, count: int, drawn: int) -> None:
        """Every sum passes."""

    def inspect_rows(self, sums: Any) -> None:
        """All rows pass."""

    def check_bound(self, norm: float, *, count: int) -> None:
        """Every norm passes."""

    def before_noise(self, sums: Any) -> None:
        """Nothing is kept."""

    def after_noise(self, sums: Any, **_: Any) -> None:
        """All noise passes."""
