"""Cases of a parametrized test of which only some run by default."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def one_in(number: int, cases: Iterable[Any]) -> list[Any]:
    """Every so many of the cases as they are, from the first on; all others marked slow."""
    return [
        case if place % number == 0 else pytest.param(case, marks=pytest.mark.slow)
        for place, case in enumerate(cases)
    ]
