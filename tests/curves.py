"""Reports without curves, for tests of runs that last a few steps: drawing takes far longer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shuffled_dpsgd.reports import run_report

DRAW_ALL = run_report.draw_all
"""What draws them, for a test that looks at them."""


@pytest.fixture(autouse=True, scope="module")
def no_curves() -> Iterator[None]:
    """Every report is written, without its curves; tests/reports has those."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_report, "draw_all", lambda view: {})
        yield
