"""Every planted mistake is caught by the check that should, and a sound run by none."""

from __future__ import annotations

import pytest

from auditing.planted import BUGS, CHECKS, NaiveEngine, engine, replay_fails
from auditing.planted_report import report
from slow_cases import one_in

pytestmark = pytest.mark.filterwarnings("ignore:losses are multiplied")


@pytest.mark.parametrize("name", one_in(2, BUGS))
def test_planted_bug_is_caught(name: str) -> None:
    bug = BUGS[name]
    for check in bug.caught_by:
        assert CHECKS[check](bug.plant), f"{name}: not caught by {check}"


@pytest.mark.parametrize(
    "check",
    [pytest.param(c, marks=pytest.mark.slow if c == "sweep" else ()) for c in CHECKS],
)
def test_sound_run_passes(check: str) -> None:
    assert not CHECKS[check](lambda private: None)


def test_naive_engine_itself_is_sound() -> None:
    assert not replay_fails(engine(NaiveEngine))


@pytest.mark.slow
def test_every_bug_against_every_check() -> None:
    """The whole matrix, as `planted_report` writes it: nothing escapes, nothing sound is caught."""
    matrix = report()
    assert len(matrix["bugs"]) >= 12
    for name, row in matrix["bugs"].items():
        assert BUGS[name].caught_by <= set(row["caught_by"])
    assert matrix["sound_run"]["caught_by"] == []
    assert all(row["refuted"] != ("sound" in name) for name, row in matrix["special"].items())
