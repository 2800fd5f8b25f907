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
    Decision,
    Fixed,
    GaussianDP,
    HeldOut,
    Inclusion,
    JointBeta,
    OneRun,
    OneRunFDP,
    OrderStatistics,
    PaperPoint,
    ScorePair,
    claim_trade_off,
    gaussian_epsilon,
    gaussian_trade_off,
    roc,
    tpr_at_fpr,
)
from shuffled_dpsgd.auditing.estimators.clopper_pearson import epsilon_of_rates, upper_limit
from shuffled_dpsgd.auditing.estimators.gaussian_dp import composed_epsilon
from shuffled_dpsgd.auditing.estimators.joint_beta import credible_epsilon
from shuffled_dpsgd.auditing.estimators.one_run import one_run_epsilon, p_value
from shuffled_dpsgd.auditing.estimators.one_run_fdp import (
    least_size_approximate,
    least_size_gaussian,
    refutes,
)
from shuffled_dpsgd.auditing.estimators.paper_point import null_distribution
from shuffled_dpsgd.errors import InvalidArgumentError


@given(st.integers(1, 500), st.data(), st.floats(1e-4, 0.5))
@settings(max_examples=40, deadline=None)
def test_upper_limit_is_the_clopper_pearson_limit(trials: int, data, level: float) -> None:
    errors = data.draw(st.integers(0, trials))
    limit = float(upper_limit(errors, trials, level))
    if errors == trials:
        assert limit == 1.0
    else:
        assert limit == pytest.approx(beta.isf(level, errors + 1, trials - errors))
        assert binom.cdf(errors, trials, limit) == pytest.approx(level, rel=1e-6)


def test_cap_at_the_sample_size_of_the_paper() -> None:
    """5000+5000 observations, half of them for the threshold: no bound passes 6.5."""
    perfect = ScorePair(out=np.zeros(5000), present=np.ones(5000))
    bound = ClopperPearson().lower_bound(perfect, delta=2.5e-7)
    assert bound.epsilon == pytest.approx(6.52, abs=0.01)
    assert bound.counts["num_out"] == 2500


def test_decision_counts_both_tails() -> None:
    scores = ScorePair(out=np.array([0.0, 1.0, 2.0]), present=np.array([0.5, -3.0]))
    upper = Decision(threshold=0.5).errors(scores)
    lower = Decision(threshold=0.5, tail="lower").errors(scores)
    assert (upper.false_positives, upper.false_negatives) == (2, 2)
    assert (lower.false_positives, lower.false_negatives) == (1, 1)


def test_reversed_scores_give_the_same_kind_of_bound() -> None:
    """A canary that lowers the score is found as well as one that raises it."""
    rng = np.random.default_rng(0)
    scores = gaussian(3.0, 1e-5).scores(rng, 2000)
    flipped = ScorePair(out=-scores.out, present=-scores.present)
    for estimator in (ClopperPearson(), JointBeta(), GaussianDP()):
        straight = estimator.lower_bound(scores, delta=1e-5).epsilon
        assert estimator.lower_bound(flipped, delta=1e-5).epsilon == pytest.approx(
            straight, rel=0.05
        )


def test_fixed_thresholds_divide_the_level() -> None:
    scores = randomized_response(1.0).scores(np.random.default_rng(0), 3000)
    one = ClopperPearson(rule=Fixed(thresholds=(0.5,))).lower_bound(scores, delta=0.0)
    many = ClopperPearson(rule=Fixed(thresholds=(0.5,) * 10)).lower_bound(scores, delta=0.0)
    assert many.epsilon < one.epsilon


def test_joint_beta_equals_sampling_its_posterior() -> None:
    counts = Decision(threshold=0.5).errors(
        ScorePair(out=np.r_[np.zeros(90), np.ones(10)], present=np.r_[np.zeros(30), np.ones(70)])
    )
    rng = np.random.default_rng(0)
    fpr, fnr = rng.beta(11, 91, 400_000), rng.beta(31, 71, 400_000)
    sampled = np.quantile(np.log((1 - fnr) / fpr), 0.05)
    found = credible_epsilon(counts, "present", delta=0.0, confidence=0.95)
    assert found == pytest.approx(sampled, abs=5e-3)


def test_gaussian_epsilon_inverts_the_exact_delta() -> None:
    for mu in (0.3, 1.0, 3.65):
        epsilon = gaussian_epsilon(mu, 1e-6)
        delta = norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(
            -mu / 2 - epsilon / mu
        )
        assert delta == pytest.approx(1e-6, rel=1e-5)
    assert gaussian_epsilon(0.0, 1e-6) == 0.0
    assert gaussian_epsilon(1.0, 0.0) == math.inf


def test_composition_of_a_measured_mu_is_a_lower_bound_that_is_close() -> None:
    from shuffled_dpsgd.accounting import certified_claim

    run = {"sampling_prob": 0.02, "num_steps": 500, "delta": 5e-6}
    certified = certified_claim(noise_multiplier=1.95, **run).epsilon
    composed = composed_epsilon(1.0 / 1.95, **run)
    assert 0.9 * certified < composed <= certified


@given(st.integers(1, 60), st.data())
@settings(max_examples=30, deadline=None)
def test_one_run_p_value_is_theorem_5_2(guesses: int, data) -> None:
    right = data.draw(st.integers(0, guesses))
    epsilon = data.draw(st.floats(0.0, 5.0))
    delta, canaries = 1e-3, guesses + 7
    law = binom(guesses, 1.0 / (1.0 + math.exp(-epsilon)))
    tail = law.sf(right - 1)
    steepest = max(((law.sf(right - i - 1) - tail) / i for i in range(1, right + 1)), default=0.0)
    found = p_value(
        epsilon, delta=delta, num_canaries=canaries, num_guesses=guesses, num_right=right
    )
    assert found == pytest.approx(min(1.0, tail + 2 * canaries * delta * steepest), rel=1e-9)


def test_one_run_epsilon_is_the_edge_of_refutation() -> None:
    counts = {"num_canaries": 500, "num_guesses": 100, "num_right": 90}
    epsilon = one_run_epsilon(**counts, delta=1e-6, level=0.05)
    assert p_value(epsilon, delta=1e-6, **counts) <= 0.05
    assert p_value(epsilon + 1e-3, delta=1e-6, **counts) > 0.05


def test_fdp_recursion_never_refutes_what_the_binomial_allows() -> None:
    """Pure ε-DP with every canary guessed: W is at most Binomial, reached by randomized response.

    A sound test rejects only counts whose binomial tail lies below the level.
    """
    guesses, level, epsilon = 60, 0.05, 1.0
    law = binom(guesses, 1.0 / (1.0 + math.exp(-epsilon)))
    for right in range(guesses + 1):
        rejected = refutes(
            least_size_approximate(epsilon, 0.0),
            num_canaries=guesses,
            num_guesses=guesses,
            num_right=right,
            level=level,
        )
        if rejected:
            assert law.sf(right - 1) <= level
    assert refutes(
        least_size_approximate(epsilon, 0.0),
        num_canaries=guesses,
        num_guesses=guesses,
        num_right=int(law.isf(level)) + 4,
        level=level,
    )


def test_least_sizes_invert_their_trade_off_curves() -> None:
    size = np.linspace(0.01, 0.99, 50)
    for mu in (0.5, 2.0):
        power = 1.0 - gaussian_trade_off(size, mu=mu)
        back = [least_size_gaussian(mu)(p) for p in power]
        np.testing.assert_allclose(back, size, rtol=1e-6)
    power = 1.0 - claim_trade_off(size, epsilon=1.0, delta=0.01)
    inside = power < 1.0
    back = np.array([least_size_approximate(1.0, 0.01)(p) for p in power])
    np.testing.assert_allclose(back[inside], size[inside], rtol=1e-6)


def test_guessing_calls_extremes_and_abstains_in_between() -> None:
    inclusion = Inclusion(
        scores=np.arange(10.0), included=np.array([0, 0, 1, 1, 0, 1, 0, 1, 1, 0], dtype=bool)
    )
    assert inclusion.guess(4) == 3
    assert inclusion.guess(10) == 6


def test_roc_and_tpr_at_fpr() -> None:
    scores = gaussian(2.0, 1e-5).scores(np.random.default_rng(1), 20_000)
    curve = roc(scores)
    assert curve.area == pytest.approx(norm.cdf(2.0 / math.sqrt(2.0)), abs=0.01)
    at = tpr_at_fpr(scores, 0.01)
    assert at.false_positive_rate <= 0.01
    assert at.true_positive_rate == pytest.approx(norm.cdf(2.0 - norm.isf(0.01)), abs=0.03)
    assert at.lower_limit < at.true_positive_rate
    size, missed = curve.trade_off()
    assert np.abs(missed - gaussian_trade_off(size, mu=2.0)).mean() < 0.01


def test_paper_estimator_as_printed() -> None:
    """α = 1/4 and β = 1/2 at the only kept threshold: ln((1 − 1/4)/(1/2)) and ln((1/2)/(1/4))."""
    scores = ScorePair(out=np.array([0.0, 0.0, 0.0, 1.0]), present=np.array([0.0, 0.0, 1.0, 1.0]))
    found = PaperPoint().lower_bound(scores, delta=0.0)
    assert found.epsilon == pytest.approx(max(math.log(1.5), math.log(2.0)))
    assert found.confidence is None
    assert epsilon_of_rates(np.array([0.25]), np.array([0.5]), 0.0)[0] == found.epsilon


def test_paper_estimator_prints_its_table_on_pure_noise() -> None:
    """Both figures of the paper's Table 6 lie where the estimator lands when nothing leaks."""
    noise = null_distribution(num_observations=5000, delta=2.5e-7, repetitions=100)
    low, high = np.quantile(noise, (0.05, 0.95))
    assert low < 0.4771 < high
    assert low < 0.7005 < high
    assert np.median(noise) > 0.4


@pytest.mark.parametrize(
    "estimator", [ClopperPearson(), JointBeta(), GaussianDP(), OrderStatistics(), OneRun()]
)
def test_levels_out_of_range_are_refused(estimator) -> None:
    rng = np.random.default_rng(0)
    known = gaussian(1.0, 1e-5)
    seen = known.inclusion(rng, 50) if isinstance(estimator, OneRun) else known.scores(rng, 50)
    with pytest.raises(InvalidArgumentError, match="delta"):
        estimator.lower_bound(seen, delta=1.0)
    with pytest.raises(InvalidArgumentError, match="confidence"):
        estimator.lower_bound(seen, delta=0.0, confidence=1.0)


def test_bad_scores_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="finite"):
        ScorePair(out=np.array([0.0, np.nan]), present=np.zeros(2))
    with pytest.raises(InvalidArgumentError, match="canar"):
        Inclusion(scores=np.zeros(3), included=np.zeros(2, dtype=bool))
    with pytest.raises(InvalidArgumentError, match="fraction"):
        HeldOut(fraction=1.0)
    with pytest.raises(InvalidArgumentError, match="thresholds"):
        Fixed(thresholds=())


def test_bounds_travel_as_measured_claims() -> None:
    scores = gaussian(2.0, 1e-5).scores(np.random.default_rng(0), 400)
    claim = ClopperPearson().lower_bound(scores, delta=1e-5).as_claim()
    assert claim.kind == "measured"
    assert "measured" in claim.describe()
    assert OneRunFDP(family="gaussian").name != OneRunFDP().name
