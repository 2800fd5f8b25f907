"""Every bound stays below the truth as often as it says, on mechanisms whose ε is known."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import binom

from auditing.known import Known, gaussian, laplace, leaky_response, randomized_response
from shuffled_dpsgd.auditing.estimators import (
    ClopperPearson,
    Fixed,
    GaussianDP,
    JointBeta,
    OneRun,
    OneRunFDP,
    PaperPoint,
)

REPETITIONS = 200
CONFIDENCE = 0.95
MECHANISMS = [
    gaussian(1.0, 1e-5),
    gaussian(3.0, 1e-5),
    laplace(1.0),
    randomized_response(0.3),
    randomized_response(3.0),
    leaky_response(0.5, 0.05),
]
GAUSSIANS = MECHANISMS[:2]


def most_misses() -> int:
    """More misses than this happen once in a thousand if the level holds exactly."""
    return int(binom.ppf(0.999, REPETITIONS, 1.0 - CONFIDENCE))


def bounds(estimator: object, mechanism: Known, count: int, *, one_run: bool) -> np.ndarray:
    found = []
    for repetition in range(REPETITIONS):
        rng = np.random.default_rng([repetition, count])
        seen = mechanism.inclusion(rng, count) if one_run else mechanism.scores(rng, count)
        bound = estimator.lower_bound(seen, delta=mechanism.delta, confidence=CONFIDENCE)
        found.append(bound.epsilon)
    return np.array(found)


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=lambda m: m.name)
@pytest.mark.parametrize(
    "estimator",
    [ClopperPearson(), ClopperPearson(rule=Fixed(thresholds=(0.5, 1.5))), JointBeta()],
    ids=["held-out", "fixed", "joint-beta"],
)
def test_two_world_bounds_keep_their_level(estimator: object, mechanism: Known) -> None:
    found = bounds(estimator, mechanism, 600, one_run=False)
    assert (found > mechanism.epsilon).sum() <= most_misses()


@pytest.mark.parametrize("mechanism", GAUSSIANS, ids=lambda m: m.name)
def test_gaussian_dp_keeps_its_level_on_gaussians_and_is_close(mechanism: Known) -> None:
    found = bounds(GaussianDP(), mechanism, 2000, one_run=False)
    assert (found > mechanism.epsilon).sum() <= most_misses()
    assert np.median(found) > 0.75 * mechanism.epsilon


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=lambda m: m.name)
@pytest.mark.parametrize("estimator", [OneRun(), OneRunFDP()], ids=lambda e: e.name)
def test_one_run_bounds_keep_their_level(estimator: object, mechanism: Known) -> None:
    found = bounds(estimator, mechanism, 400, one_run=True)
    assert (found > mechanism.epsilon).sum() <= most_misses()


@pytest.mark.parametrize("mechanism", GAUSSIANS, ids=lambda m: m.name)
def test_one_run_gaussian_family_keeps_its_level(mechanism: Known) -> None:
    found = bounds(OneRunFDP(family="gaussian"), mechanism, 400, one_run=True)
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
    found = bounds(PaperPoint(), mechanism, 600, one_run=False)
    assert (found > mechanism.epsilon).mean() > 0.5
