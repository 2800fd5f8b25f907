"""Everything `shuffled-dpsgd reproduce` can rebuild, by name.

A reproduction writes its files under a directory and returns their paths. Figures are listed here;
tables join by adding their mapping to `REPRODUCTIONS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd_experiments.claims import Claims
from shuffled_dpsgd_experiments.figures import FIGURES


class Reproduction(Protocol):
    """One figure or table of the paper."""

    @property
    def name(self) -> str: ...

    @property
    def title(self) -> str: ...

    def reproduce(self, directory: Path) -> list[Path]: ...


REPRODUCTIONS: Mapping[str, Reproduction] = MappingProxyType({**FIGURES, "claims": Claims()})


def find(names: list[str]) -> list[Reproduction]:
    """The named reproductions in order; refuses a name that is not one of them."""
    for name in names:
        if name not in REPRODUCTIONS:
            raise InvalidArgumentError(
                "name",
                expected=f"one of {', '.join(REPRODUCTIONS)}",
                got=name,
                remedy="`shuffled-dpsgd reproduce --list` describes them",
            )
    return [REPRODUCTIONS[name] for name in names]
