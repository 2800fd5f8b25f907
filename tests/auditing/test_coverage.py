"""Every bound stays below the truth as often as it says, on mechanisms whose ε is known."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import binom

from auditing import coverage_report
from auditing.coverage_report import (
    CONFIDENCE,
    GAUSSIAN_ONE_RUN,
    GAUSSIAN_ONLY,
    MECHANISMS,
    NO_LEVEL,
    ONE_RUN,
    TWO_WORLDS,
)
from auditing.known import Known, gaussian, laplace, randomized_response
from shuffled_dpsgd.auditing.estimators import (
    ClopperPearson,
    GaussianDP,
    JointBeta,
    OneRun,
    OneRunFDP,
)

REPETITIONS = 120
TIGHT = ("randomized response 3.0", "uniform 0.05", "nothing")
COMMITTED = Path(__file__).parents[2] / "results" / "audit_coverage.json"
GAUSSIANS = MECHANISMS[:2]


def bounds(estimator: object, mechanism: Known, count: int, *, one_run: bool) -> np.ndarray:
    return coverage_report.bounds(
        estimator, mechanism, count, one_run=one_run, repetitions=REPETITIONS
    )


def most_misses() -> int:
    """More misses than this happen once in a thousand if the level holds exactly."""
    return int(binom.ppf(0.999, REPETITIONS, 1.0 - CONFIDENCE))


@pytest.mark.parametrize(
    ("name", "mechanism"),
    [
        pytest.param(
            name,
            known,
            id=f"{name}-{known.name}",
            marks=pytest.mark.slow if name == "joint-beta" and known.name not in TIGHT else (),
        )
        for name in TWO_WORLDS
        if name != "order-statistics"
        for known in MECHANISMS
    ],
)
def test_two_world_bounds_keep_their_level(name: str, mechanism: Known) -> None:
    found = bounds(TWO_WORLDS[name], mechanism, 300, one_run=False)
    assert (found > mechanism.epsilon).sum() <= most_misses()


@pytest.mark.parametrize(
    "mechanism",
    [
        pytest.param(known, id=known.name, marks=() if known.name in TIGHT else pytest.mark.slow)
        for known in MECHANISMS
    ],
)
def test_order_statistics_keep_their_level(mechanism: Known) -> None:
    estimator, few = TWO_WORLDS["order-statistics"], 60
    found = coverage_report.bounds(estimator, mechanism, 150, one_run=False, repetitions=few)
    assert (found > mechanism.epsilon).sum() <= binom.ppf(0.999, few, 1.0 - CONFIDENCE)


def test_committed_coverage_holds_for_every_estimator_that_states_a_level() -> None:
    """1000 repetitions each; more misses than allowed happen once in a thousand per row."""
    committed = json.loads(COMMITTED.read_text(encoding="utf-8"))
    assert committed["repetitions"] >= 1000
    allowed = binom.ppf(0.999, committed["repetitions"], 1.0 - CONFIDENCE)
    for name in (*TWO_WORLDS, *ONE_RUN, *GAUSSIAN_ONLY, *GAUSSIAN_ONE_RUN):
        rows = committed["estimators"][name]
        assert len(rows) >= (2 if "gaussian" in name else 8)
        for row in rows.values():
            assert row["above_the_truth"] * committed["repetitions"] <= allowed


@pytest.mark.parametrize("mechanism", GAUSSIANS, ids=lambda m: m.name)
def test_gaussian_dp_keeps_its_level_on_gaussians_and_is_close(mechanism: Known) -> None:
    found = bounds(GAUSSIAN_ONLY["gaussian-dp"], mechanism, 2000, one_run=False)
    assert (found > mechanism.epsilon).sum() <= most_misses()
    assert np.median(found) > 0.75 * mechanism.epsilon


@pytest.mark.parametrize("mechanism", MECHANISMS[:6], ids=lambda m: m.name)
@pytest.mark.parametrize("name", ONE_RUN)
def test_one_run_bounds_keep_their_level(name: str, mechanism: Known) -> None:
    found = bounds(ONE_RUN[name], mechanism, 400, one_run=True)
    assert (found > mechanism.epsilon).sum() <= most_misses()


@pytest.mark.parametrize("mechanism", GAUSSIANS, ids=lambda m: m.name)
def test_one_run_gaussian_family_keeps_its_level(mechanism: Known) -> None:
    (estimator,) = GAUSSIAN_ONE_RUN.values()
    found = bounds(estimator, mechanism, 400, one_run=True)
    assert (found > mechanism.epsilon).sum() <= most_misses()


def test_bounds_are_close_where_the_sample_allows_it() -> None:
    """Each reaches most of a moderate ε; the paper's point estimate exceeds it, having no level."""
    mechanism = randomized_response(1.5)
    rng = np.random.default_rng(5)
    scores, inclusion = mechanism.scores(rng, 20_000), mechanism.inclusion(rng, 5000)
    for estimator in (ClopperPearson(), JointBeta()):
        assert estimator.lower_bound(scores, delta=0.0).epsilon > 0.9 * mechanism.epsilon
    full = {"guess_shares": (1.0,)}
    for one_run in (OneRun(**full), OneRunFDP(**full)):
        assert one_run.lower_bound(inclusion, delta=0.0).epsilon > 0.9 * mechanism.epsilon


def test_strongest_reaches_half_of_a_single_steps_true_epsilon() -> None:
    """The assumption-free bound at σ = 1, and the Gaussian one at the paper's own σ."""
    moderate = gaussian(1.0, 1e-2)
    rng = np.random.default_rng(3)
    bound = JointBeta().lower_bound(moderate.scores(rng, 20_000), delta=1e-2)
    assert bound.epsilon > 0.5 * moderate.epsilon
    strong = gaussian(1.0 / 0.274, 2.5e-7)
    bound = GaussianDP().lower_bound(strong.scores(rng, 5000), delta=2.5e-7)
    assert 0.5 * strong.epsilon < bound.epsilon < strong.epsilon


def test_gaussian_dp_overstates_other_curves_so_it_may_not_refute() -> None:
    """On Laplace noise the Gaussian extrapolation passes the true ε: hence the label."""
    mechanism = laplace(2.0)
    scores = mechanism.scores(np.random.default_rng(1), 20_000)
    found = GaussianDP().lower_bound(scores, delta=1e-9, confidence=CONFIDENCE)
    assert found.epsilon > mechanism.epsilon
    assert found.may_refute == "Gaussian claims"


def test_paper_point_exceeds_the_truth_far_more_often_than_any_level() -> None:
    mechanism = randomized_response(1.0)
    found = bounds(NO_LEVEL["paper-point"], mechanism, 600, one_run=False)
    assert (found > mechanism.epsilon).mean() > 0.5
