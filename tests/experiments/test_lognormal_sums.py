"""One suite for every method for sums of log-normals, and brute force as the judge."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from scipy.special import ndtr
from scipy.stats import ks_2samp

from shuffled_dpsgd.accounting.order_statistics import draw_sums
from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd_experiments.figures.lognormal_sum import METHODS, LognormalSum, monte_carlo

every = pytest.mark.parametrize("name", METHODS)


@cache
def brute_force(total: LognormalSum, draws: int, seed: int) -> np.ndarray:
    """log S by drawing every term."""
    rng = np.random.default_rng(seed)
    result = np.empty(draws)
    for index in range(draws):
        terms = total.std * rng.standard_normal(total.dimension)
        terms[0] += total.spike
        peak = terms.max()
        result[index] = peak + np.log(np.exp(terms - peak).sum())
    return result


@every
def test_it_returns_a_cdf(name: str) -> None:
    cdf = METHODS[name](LognormalSum(dimension=1000, std=2.0))
    values = cdf(np.linspace(-20.0, 60.0, 500))
    assert values.shape == (500,)
    assert (np.diff(values) >= -1e-12).all()
    assert values[0] == pytest.approx(0.0, abs=1e-6)
    assert values[-1] == pytest.approx(1.0, abs=1e-6)


@every
def test_one_term_is_the_normal_itself(name: str) -> None:
    at = np.linspace(-3.0, 3.0, 13)
    cdf = METHODS[name](LognormalSum(dimension=1, std=1.5, spike=0.5), draws=20_000)
    assert cdf(at) == pytest.approx(ndtr((at - 0.5) / 1.5), abs=0.015)


@every
@pytest.mark.parametrize("spike", [0.0, 3.0])
def test_every_method_is_right_where_terms_vary_little(name: str, spike: float) -> None:
    total = LognormalSum(dimension=300, std=0.3, spike=spike)
    truth = np.sort(brute_force(total, 4000, seed=1))
    values = METHODS[name](total, draws=4000, seed=2)(truth)
    empirical = (np.arange(truth.size) + 0.5) / truth.size
    assert np.abs(values - empirical).max() < 0.06


@every
def test_the_same_seed_gives_the_same_law(name: str) -> None:
    total, at = LognormalSum(dimension=10**5, std=3.0), np.linspace(14.0, 20.0, 9)
    first, again = (METHODS[name](total, seed=5)(at) for _ in range(2))
    assert (first == again).all()


@pytest.mark.parametrize(
    ("dimension", "std", "spike", "draws"),
    [
        (2000, 4.0, 0.0, 3000),
        (2000, 8.0, 5.0, 3000),
        (20_000, 4.0, 10.0, 1500),
        pytest.param(20_000, 1.0, 0.0, 1500, marks=pytest.mark.slow),
    ],
)
def test_order_statistics_draw_what_brute_force_draws(
    dimension: int, std: float, spike: float, draws: int
) -> None:
    total = LognormalSum(dimension=dimension, std=std, spike=spike)
    quick = total.draw_log(20_000, np.random.default_rng(3))
    assert ks_2samp(brute_force(total, draws, seed=4), quick).pvalue > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("std", [1.0, 4.0])
def test_order_statistics_against_brute_force_at_a_million(std: float) -> None:
    total = LognormalSum(dimension=10**6, std=std)
    quick = total.draw_log(20_000, np.random.default_rng(3))
    assert ks_2samp(brute_force(total, 1000, seed=4), quick).pvalue > 1e-3


@pytest.mark.parametrize("exponents", [[3.0], [1.0, 4.0], [-3.0, 5.0], [-4.0, -2.0], [0.0, 2.0]])
def test_joint_draws_agree_with_brute_force(exponents: list[float]) -> None:
    """Linear and exponential sums together: marginals, and the correlation between them."""
    rng, dimension = np.random.default_rng(7), 1500
    linear, logs = [], []
    for _ in range(3000):
        z = rng.standard_normal(dimension)
        linear.append(z.sum())
        logs.append([np.log(np.exp(s * z).sum()) for s in exponents])
    brute = np.column_stack([linear, logs])
    sums = draw_sums(dimension, exponents, 20_000, rng, kept=128)
    quick = np.column_stack([sums.linear, sums.log_exponential])
    for column in range(brute.shape[1]):
        if brute[:, column].std() < 1e-9:
            assert quick[:, column] == pytest.approx(brute[0, column], abs=1e-6)
            continue
        assert ks_2samp(brute[:, column], quick[:, column]).pvalue > 1e-3
    moving = [c for c in range(brute.shape[1]) if brute[:, c].std() > 1e-9]
    expected = np.corrcoef(brute[:, moving].T)
    assert np.corrcoef(quick[:, moving].T) == pytest.approx(expected, abs=0.08)


def test_a_hundred_million_terms() -> None:
    """The paper's brute force took 62 minutes for these thousand draws."""
    total = LognormalSum(dimension=10**8, std=4.0)
    cdf = monte_carlo(total, draws=1000)
    # The exact mean of S is d·e^{std²/2}; the median of log S lies just below its logarithm.
    assert cdf([26.3])[0] < 0.1
    assert cdf([26.6])[0] > 0.9


@pytest.mark.parametrize("change", [{"dimension": 0}, {"std": 0.0}, {"std": float("inf")}])
def test_sums_that_are_none_are_refused(change: dict[str, float]) -> None:
    with pytest.raises(InvalidArgumentError):
        LognormalSum(**{"dimension": 5, "std": 1.0, **change})  # type: ignore[arg-type]
