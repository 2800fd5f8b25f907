"""One suite for every method for sums of log-normals, and brute force as the judge."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from scipy.special import ndtr
from scipy.stats import ks_2samp

from shuffled_dpsgd_experiments.examination.order_statistics import draw_sums
from shuffled_dpsgd_experiments.figures.lognormal_sum import METHODS, draw_log

every = pytest.mark.parametrize("name", METHODS)


@cache
def brute_force(dimension: int, std: float, draws: int, seed: int) -> np.ndarray:
    """Sorted logarithms of the sum by drawing every term."""
    rng = np.random.default_rng(seed)
    result = np.empty(draws)
    for index in range(draws):
        terms = std * rng.standard_normal(dimension)
        peak = terms.max()
        result[index] = peak + np.log(np.exp(terms - peak).sum())
    return np.sort(result)


@every
def test_it_returns_a_cdf(name: str) -> None:
    cdf = METHODS[name](1000, 2.0, draw_log(1000, 2.0, 1000, 0))
    values = cdf(np.linspace(-20.0, 60.0, 500))
    assert values.shape == (500,)
    assert (np.diff(values) >= -1e-12).all()
    assert values[0] == pytest.approx(0.0, abs=1e-6)
    assert values[-1] == pytest.approx(1.0, abs=1e-6)


@every
def test_one_term_is_the_normal_itself(name: str) -> None:
    at = np.linspace(-3.0, 3.0, 13)
    cdf = METHODS[name](1, 1.5, draw_log(1, 1.5, 20_000, 0))
    assert cdf(at) == pytest.approx(ndtr(at / 1.5), abs=0.015)


@every
def test_every_method_is_right_where_terms_vary_little(name: str) -> None:
    truth = brute_force(300, 0.3, 4000, seed=1)
    values = METHODS[name](300, 0.3, draw_log(300, 0.3, 4000, 2))(truth)
    empirical = (np.arange(truth.size) + 0.5) / truth.size
    assert np.abs(values - empirical).max() < 0.06


def test_the_same_seed_gives_the_same_sample() -> None:
    first, again = (draw_log(10**5, 3.0, 1500, 5) for _ in range(2))
    assert (first == again).all()


@pytest.mark.parametrize(
    ("dimension", "std", "draws"),
    [
        (2000, 4.0, 3000),
        (2000, 8.0, 3000),
        (20_000, 4.0, 1500),
        pytest.param(20_000, 1.0, 1500, marks=pytest.mark.slow),
        pytest.param(10**6, 1.0, 1000, marks=pytest.mark.slow),
        pytest.param(10**6, 4.0, 1000, marks=pytest.mark.slow),
    ],
)
def test_order_statistics_draw_what_brute_force_draws(
    dimension: int, std: float, draws: int
) -> None:
    quick = draw_log(dimension, std, 20_000, 3)
    assert ks_2samp(brute_force(dimension, std, draws, seed=4), quick).pvalue > 1e-3


@pytest.mark.parametrize("exponents", [[3.0], [1.0, 4.0], [0.0, 2.0]])
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
    sample = draw_log(10**8, 4.0, 1000, 0)
    # The exact mean of the sum is d·e^{std²/2}; the median of its log lies just below the log.
    assert np.mean(sample <= 26.3) < 0.1
    assert np.mean(sample <= 26.6) > 0.9
