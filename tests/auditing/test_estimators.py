"""Single estimators against closed forms, brute force and their own stated limits."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import beta, binom, norm

from auditing.known import gaussian, randomized_response
from shuffled_dpsgd.auditing.estimators import (
    ClopperPearson,
    Inclusion,
    OneRunFDP,
    OrderStatistics,
    ScorePair,
    area_of,
    claim_trade_off,
    roc,
)
from shuffled_dpsgd.auditing.estimators.clopper_pearson import epsilon_of_rates, errors, upper_limit
from shuffled_dpsgd.auditing.estimators.curves import tpr_at_fpr
from shuffled_dpsgd.auditing.estimators.one_run import Guesses, least_size
from shuffled_dpsgd.auditing.estimators.order_statistics import composed_epsilon
from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd_experiments.audits.paper_audit import LACKS, null_distribution, paper_point


@given(st.integers(1, 500), st.data(), st.floats(1e-4, 0.5))
@settings(max_examples=40, deadline=None)
def test_upper_limit_is_the_clopper_pearson_limit(trials: int, data, level: float) -> None:
    wrong = data.draw(st.integers(0, trials))
    limit = float(upper_limit(wrong, trials, level))
    if wrong == trials:
        assert limit == 1.0
    else:
        assert limit == pytest.approx(beta.isf(level, wrong + 1, trials - wrong))
        assert binom.cdf(wrong, trials, limit) == pytest.approx(level, rel=1e-6)


def test_cap_at_the_sample_size_of_the_paper() -> None:
    """5000+5000 observations, half of them for the threshold: no bound passes 6.5."""
    perfect = ScorePair(out=np.zeros(5000), present=np.ones(5000))
    bound = ClopperPearson().lower_bound(perfect, delta=2.5e-7)
    assert bound.epsilon == pytest.approx(6.52, abs=0.01)
    assert bound.counts["num_out"] == 2500


def test_decision_counts_both_tails() -> None:
    scores = ScorePair(out=np.array([0.0, 1.0, 2.0]), present=np.array([0.5, -3.0]))
    assert errors(scores, 0.5) == (2, 2)
    assert errors(scores, 0.5, -1.0) == (1, 1)


def test_reversed_scores_give_the_same_kind_of_bound() -> None:
    """A canary that lowers the score is found as well as one that raises it."""
    rng = np.random.default_rng(0)
    scores = gaussian(3.0, 1e-5).scores(rng, 2000)
    flipped = ScorePair(out=-scores.out, present=-scores.present)
    straight = ClopperPearson().lower_bound(scores, delta=1e-5).epsilon
    backwards = ClopperPearson().lower_bound(flipped, delta=1e-5).epsilon
    assert backwards == pytest.approx(straight, rel=0.05)


def test_gaussian_epsilon_inverts_the_exact_delta() -> None:
    for mu in (0.3, 1.0, 3.65):
        epsilon = composed_epsilon(mu, sampling_prob=1.0, num_steps=1, delta=1e-6)
        delta = norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(
            -mu / 2 - epsilon / mu
        )
        assert delta == pytest.approx(1e-6, rel=1e-5)
    assert composed_epsilon(0.0, sampling_prob=1.0, num_steps=1, delta=1e-6) == 0.0
    assert composed_epsilon(1.0, sampling_prob=1.0, num_steps=1, delta=0.0) == math.inf


def test_composition_of_a_measured_mu_is_a_lower_bound_that_is_close() -> None:
    from shuffled_dpsgd.accounting import certified_claim

    run = {"sampling_prob": 0.02, "num_steps": 500, "delta": 5e-6}
    certified = certified_claim(noise_multiplier=1.95, **run).epsilon
    composed = composed_epsilon(1.0 / 1.95, **run)
    assert 0.9 * certified < composed <= certified


def test_fdp_recursion_never_refutes_what_the_binomial_allows() -> None:
    """Pure ε-DP with every canary guessed: W is at most Binomial, reached by randomized response.

    A sound test rejects only counts whose binomial tail lies below the level.
    """
    guesses, level, epsilon = 60, 0.05, 1.0
    law = binom(guesses, 1.0 / (1.0 + math.exp(-epsilon)))

    def refuted(right: int) -> bool:
        seen = Guesses(num_canaries=guesses, num_guesses=guesses, num_right=right)
        return seen.refute(epsilon, delta=0.0, level=level)

    for right in range(guesses + 1):
        if refuted(right):
            assert law.sf(right - 1) <= level
    assert refuted(int(law.isf(level)) + 4)


def test_one_run_epsilon_is_the_edge_of_refutation() -> None:
    seen = Guesses(num_canaries=500, num_guesses=100, num_right=90)
    epsilon = seen.largest_refuted(delta=1e-6, level=0.05)
    assert seen.refute(epsilon, delta=1e-6, level=0.05)
    assert not seen.refute(epsilon + 1e-3, delta=1e-6, level=0.05)
    chance = Guesses(num_canaries=500, num_guesses=100, num_right=50)
    assert chance.largest_refuted(delta=1e-6, level=0.05) == 0.0


def test_least_sizes_invert_the_trade_off_curve() -> None:
    size = np.linspace(0.01, 0.99, 50)
    power = 1.0 - claim_trade_off(size, epsilon=1.0, delta=0.01)
    inside = power < 1.0
    back = np.array([least_size(p, epsilon=1.0, delta=0.01) for p in power])
    np.testing.assert_allclose(back[inside], size[inside], rtol=1e-6)


def test_guessing_calls_extremes_and_abstains_in_between() -> None:
    inclusion = Inclusion(
        scores=np.arange(10.0), included=np.array([0, 0, 1, 1, 0, 1, 0, 1, 1, 0], dtype=bool)
    )
    assert Guesses.of(inclusion, 4).num_right == 3
    assert Guesses.of(inclusion, 10).num_right == 6


def test_roc_and_tpr_at_fpr() -> None:
    scores = gaussian(2.0, 1e-5).scores(np.random.default_rng(1), 20_000)
    curve = roc(scores)
    assert curve.area == pytest.approx(norm.cdf(2.0 / math.sqrt(2.0)), abs=0.01)
    at = tpr_at_fpr(scores, 0.01)
    assert at.false_positive_rate <= 0.01
    assert at.true_positive_rate == pytest.approx(norm.cdf(2.0 - norm.isf(0.01)), abs=0.03)
    assert at.lower_limit < at.true_positive_rate
    expected = norm.sf(norm.isf(curve.false_positive_rate) - 2.0)
    assert np.abs(curve.true_positive_rate - expected).mean() < 0.01


@pytest.mark.parametrize("mu", [0.0, 1.0, 3.0])
def test_intervals_of_areas_hold_the_true_one_as_often_as_they_say(mu: float) -> None:
    """500 data sets of 40 + 40 scores; more misses happen once in a thousand."""
    truth, misses = norm.cdf(mu / math.sqrt(2.0)), 0
    for repetition in range(500):
        rng = np.random.default_rng([repetition, 3])
        found = area_of(gaussian(mu, 1e-5).scores(rng, 40))
        misses += not found.low <= truth <= found.high
        assert found.low <= found.area <= found.high
    assert misses <= binom.ppf(0.999, 500, 0.05)


def test_areas_at_the_ends_and_with_ties() -> None:
    """Complete separation has an interval with a width; ties count for one half."""
    perfect = ScorePair(out=np.zeros(20), present=np.ones(20))
    assert area_of(perfect).area == area_of(perfect).high == 1.0
    assert 0.7 < area_of(perfect).low < 0.95
    reversed_ = area_of(ScorePair(out=np.ones(20), present=np.zeros(20)))
    assert reversed_.area == reversed_.low == 0.0
    tied = area_of(ScorePair(out=np.zeros(20), present=np.zeros(20)))
    assert tied.area == 0.5
    assert tied.low < 0.5 < tied.high
    assert "0.500 (95 %: " in str(tied)


def test_paper_estimator_as_printed() -> None:
    """α = 1/4 and β = 1/2 at the only kept threshold: ln((1 − 1/4)/(1/2)) and ln((1/2)/(1/4))."""
    scores = ScorePair(out=np.array([0.0, 0.0, 0.0, 1.0]), present=np.array([0.0, 0.0, 1.0, 1.0]))
    found = paper_point(scores, delta=0.0)
    assert found == pytest.approx(max(math.log(1.5), math.log(2.0)))
    assert epsilon_of_rates(np.array([0.25]), np.array([0.5]), 0.0)[0] == found
    perfect = ScorePair(out=np.zeros(5), present=np.ones(5))
    assert paper_point(perfect, delta=0.0, drop="nothing") == math.inf
    assert "no confidence interval" in LACKS[0]


def test_paper_point_exceeds_the_truth_far_more_often_than_any_level() -> None:
    mechanism = randomized_response(1.0)
    found = [
        paper_point(mechanism.scores(np.random.default_rng([r, 600]), 600), delta=0.0)
        for r in range(120)
    ]
    assert (np.array(found) > mechanism.epsilon).mean() > 0.5


def test_paper_estimator_prints_its_table_on_pure_noise() -> None:
    """Both figures of the paper's Table 6 lie where the estimator lands when nothing leaks."""
    noise = null_distribution(num_observations=5000, delta=2.5e-7, repetitions=100)
    low, high = np.quantile(noise, (0.05, 0.95))
    assert low < 0.4771 < high
    assert low < 0.7005 < high
    assert np.median(noise) > 0.4


@pytest.mark.parametrize("estimator", [ClopperPearson(), OrderStatistics(), OneRunFDP()])
def test_levels_out_of_range_are_refused(estimator) -> None:
    rng = np.random.default_rng(0)
    known = gaussian(1.0, 1e-5)
    seen = known.inclusion(rng, 50) if estimator.reads is Inclusion else known.scores(rng, 50)
    with pytest.raises(InvalidArgumentError, match="delta"):
        estimator.lower_bound(seen, delta=1.0)
    with pytest.raises(InvalidArgumentError, match="confidence"):
        estimator.lower_bound(seen, delta=0.0, confidence=1.0)


def test_bad_scores_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="finite"):
        ScorePair(out=np.array([0.0, np.nan]), present=np.zeros(2))
    with pytest.raises(InvalidArgumentError, match="canar"):
        Inclusion(scores=np.zeros(3), included=np.zeros(2, dtype=bool))
    few = ScorePair(out=np.zeros(3), present=np.zeros(3))
    with pytest.raises(InvalidArgumentError, match="four per world"):
        ClopperPearson().lower_bound(few, delta=0.0)


def test_bounds_travel_as_measured_claims() -> None:
    scores = gaussian(2.0, 1e-5).scores(np.random.default_rng(0), 400)
    claim = ClopperPearson().lower_bound(scores, delta=1e-5).to_json()
    assert claim["kind"] == "measured"
    assert claim["confidence"] == 0.95
