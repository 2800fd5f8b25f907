"""Order-statistics bounds: against a slow oracle, on ties, beside the best public estimators."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import beta, kstest

from auditing import comparison_report
from auditing.known import gaussian, randomized_response
from shuffled_dpsgd.auditing.estimators import ClopperPearson, OrderStatistics, ScorePair
from shuffled_dpsgd.auditing.estimators.order_statistics import (
    NOMINAL_SHARE,
    SingleRanks,
    approximate_curve,
    counts_above,
    examined_ranks,
    gaussian_curve,
    uniform_order_statistics,
)
from shuffled_dpsgd.errors import InvalidArgumentError

COMPARISON = json.loads(
    (Path(__file__).parents[2] / "results" / "audit_comparison.json").read_text(encoding="utf-8")
)


def least_favourable(
    epsilon: float, delta: float, count: int, rng: np.random.Generator
) -> ScorePair:
    """Scores of two worlds whose ROC is the whole (ε, δ) curve: V with P[V ≤ u] = h(u)."""
    curve, grid = approximate_curve(delta), np.linspace(0.0, 1.0, 20_001)
    power = curve.power(np.array(epsilon), grid)
    drawn = rng.random(count)
    return ScorePair(out=-rng.random(count), present=-grid[np.searchsorted(power, drawn)])


def statistic(scores: ScorePair, delta: float, level: float, rng: np.random.Generator) -> float:
    ranks = examined_ranks(scores.num_out)
    single = SingleRanks(
        approximate_curve(delta), ranks, scores.num_out, scores.num_present, NOMINAL_SHARE * level
    )
    return float(single.largest_refuted(counts_above(scores, ranks, rng)).max())


def test_the_bound_inverts_the_test_simulated_score_by_score() -> None:
    """The slow way: whole data sets from the least favourable law, the statistic of each."""
    delta, level, count = 0.01, 0.1, 40
    rng = np.random.default_rng(0)
    seen = gaussian(1.5, delta).scores(rng, count)
    bound = OrderStatistics().lower_bound(seen, delta=delta, confidence=1 - level).epsilon
    observed = statistic(seen, delta, level, rng)
    shares = [
        np.mean(
            [
                statistic(least_favourable(epsilon, delta, count, rng), delta, level, rng)
                >= observed
                for _ in range(150)
            ]
        )
        for epsilon in (bound - 0.4, bound, bound + 0.4)
    ]
    assert shares[0] < level < shares[2]
    assert shares[1] == pytest.approx(level, abs=0.08)


def test_curves_are_the_trade_offs_of_their_claims_and_crossings_invert_them() -> None:
    sizes = np.linspace(0.001, 0.9, 50)
    for curve in (approximate_curve(0.02), gaussian_curve()):
        for parameter in (0.3, 1.0, 2.5):
            power = curve.power(np.array(parameter), sizes)
            below = power < 1.0 - 1e-9
            found = curve.crossing(sizes[below, None], power[below, None])
            np.testing.assert_allclose(found, parameter, rtol=1e-6)
            assert (np.diff(power) >= -1e-12).all()
            assert (np.diff(power, 2) <= 1e-9).all()
    assert approximate_curve(0.0).crossing(np.array([[0.5]]), np.array([[0.5]])) == 0.0


def test_order_statistics_of_uniforms_follow_their_law() -> None:
    drawn = uniform_order_statistics(50, np.array([3, 20]), 4000, np.random.default_rng(0))
    assert kstest(drawn[:, 0], beta(3, 48).cdf).pvalue > 1e-3
    assert kstest(drawn[:, 1], beta(20, 31).cdf).pvalue > 1e-3
    assert (drawn[:, 0] < drawn[:, 1]).all()


def test_counts_and_ranks() -> None:
    ranks = examined_ranks(9)
    assert ranks.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    large = examined_ranks(5000)
    assert large[0] == 1
    assert large[-1] == 5000
    assert large.size < 80
    scores = ScorePair(out=np.array([0.0, 2.0, 4.0]), present=np.array([1.0, 3.0, 5.0, 6.0]))
    above = counts_above(scores, np.array([1, 2, 3]), np.random.default_rng(0))
    assert above.tolist() == [2, 3, 4]
    tied = ScorePair(out=np.zeros(400), present=np.zeros(400))
    (half,) = counts_above(tied, np.array([200]), np.random.default_rng(0))
    assert 120 < half < 280


def test_ties_cost_little() -> None:
    """All scores of a randomized response tie; the bound stays beside the exact threshold's."""
    scores = randomized_response(2.0).scores(np.random.default_rng([1, 4000]), 4000)
    found = OrderStatistics().lower_bound(scores, delta=0.0).epsilon
    assert 1.6 < found < 2.0


def test_perfect_separation_is_capped_by_the_sample_and_higher_than_held_out() -> None:
    perfect = ScorePair(out=np.zeros(5000), present=np.ones(5000))
    found = OrderStatistics().lower_bound(perfect, delta=2.5e-7)
    held_out = ClopperPearson().lower_bound(perfect, delta=2.5e-7)
    assert held_out.epsilon < found.epsilon < np.log(5000)
    assert found.counts["false_positives"] == 0
    assert found.may_refute == "any claim"


def test_equal_worlds_reversed_worlds_and_seeds() -> None:
    rng = np.random.default_rng(4)
    same = ScorePair(out=rng.standard_normal(300), present=rng.standard_normal(300))
    assert OrderStatistics().lower_bound(same, delta=0.0).epsilon == 0.0
    pair = gaussian(2.0, 1e-5).scores(rng, 300)
    assert OrderStatistics().lower_bound(pair, delta=1e-5) == OrderStatistics().lower_bound(
        pair, delta=1e-5
    )
    backwards = ScorePair(out=-pair.out, present=-pair.present)
    assert OrderStatistics().lower_bound(backwards, delta=1e-5).epsilon == 0.0


def test_the_gaussian_family_bounds_mu_and_says_so() -> None:
    pair = gaussian(2.0, 1e-5).scores(np.random.default_rng(1), 2000)
    found = OrderStatistics(family="gaussian").lower_bound(pair, delta=1e-5)
    assert 1.7 < found.counts["mu"] < 2.0
    assert found.may_refute == "Gaussian claims"
    assert "the trade-off curve of a step is Gaussian" in found.assumptions
    with pytest.raises(InvalidArgumentError, match="family"):
        OrderStatistics(family="laplace")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "point", COMPARISON["points"], ids=lambda point: f"mu={point['mu']}-n={point['observations']}"
)
def test_at_least_as_tight_as_the_best_public_bounds(point: dict) -> None:
    """Ours computed anew on the first data set; theirs as recorded on the same scores."""
    pair = comparison_report.scores(point["mu"], point["observations"], 0)
    recorded = {name: values[0] for name, values in point["theirs"].items()}
    their_gaussian = recorded.pop("gdp")
    assert len(recorded) == 6
    found = OrderStatistics().lower_bound(pair, delta=comparison_report.DELTA)
    gaussian_found = OrderStatistics(family="gaussian").lower_bound(
        pair, delta=comparison_report.DELTA
    )
    assert found.epsilon == pytest.approx(point["ours"]["order-statistics"][0], rel=1e-6)
    assert found.epsilon >= max(recorded.values())
    assert gaussian_found.epsilon >= their_gaussian
    # On average over all data sets, against the best of theirs chosen anew on each.
    assert point["mean_of_ours"] >= point["mean_of_their_best_on_each_data_set"]
    means = {name: np.mean(values) for name, values in point["ours"].items()}
    assert means["order-statistics-gaussian"] >= np.mean(point["theirs"]["gdp"])


def test_the_comparison_covers_every_point_that_was_asked_for() -> None:
    found = {(point["mu"], point["observations"]) for point in COMPARISON["points"]}
    assert found == {(mu, n) for mu in comparison_report.MUS for n in comparison_report.SIZES}
