"""The paper's theorem 3: right where it is exact, stable everywhere, the last crossing taken."""

from __future__ import annotations

import math
from decimal import Decimal, getcontext

import mpmath
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shuffled_dpsgd.accounting import theorem
from shuffled_dpsgd.accounting.theorem import (
    log_delta,
    smallest_epsilon,
    smallest_sigma,
    theorem_delta,
)
from shuffled_dpsgd.errors import InvalidArgumentError


def analytic_gaussian(epsilon: float, sigma: float) -> float:
    """Balle & Wang 2018, equation 6, to forty digits: in double precision it cancels."""
    with mpmath.workdps(40):
        half, shift = 1 / (2 * mpmath.mpf(sigma)), mpmath.mpf(epsilon) * mpmath.mpf(sigma)
        second = mpmath.exp(mpmath.mpf(epsilon)) * mpmath.ncdf(-half - shift)
        return float(mpmath.ncdf(half - shift) - second)


def printed_formula(epsilon: float, sigma: float, d: int, clip: float) -> float:
    """The theorem word for word, in ordinary floating point, for harmless arguments only."""
    from scipy.stats import norm

    def parts(x: float) -> tuple[float, float]:
        total = 1 + (d - 1) * math.exp(-x)
        squares = 1 + (d - 1) * math.exp(-2 * x)
        variance = math.log(squares / total**2 * (math.exp(1 / sigma**2) - 1) + 1)
        return -math.log(total), math.sqrt(variance)

    zeta1, s1 = parts(d * clip / ((d - 1) * sigma**2))
    zeta2, s2 = parts(d * (1 + clip) / ((d - 1) * sigma**2))
    zeta2 -= 1 / sigma**2
    first = norm.cdf(s1 / 2 + (zeta1 - epsilon) / s1)
    return float(first - math.exp(epsilon) * norm.cdf(s2 / 2 + (zeta2 - epsilon) / s2))


@given(sigma=st.floats(0.05, 100.0), share=st.floats(0.0, 3.0))
@example(sigma=99.0, share=2.8531302481552245)
@example(sigma=93.80992027389847, share=2.9948136660414497)
def test_one_dimension_is_the_analytic_gaussian_mechanism(sigma: float, share: float) -> None:
    epsilon = share / sigma
    ours = theorem_delta(epsilon, sigma, dimension=1, batch_clip=1.0)
    # The two terms differ by a share of 1/sigma, and so much of their precision is lost.
    rel = 1e-12 * max(1.0, sigma / 40)
    assert ours == pytest.approx(analytic_gaussian(epsilon, sigma), rel=rel, abs=1e-300)


def test_one_dimension_against_forty_digits() -> None:
    """An independent check of the cancelling difference, by Taylor series in decimals."""
    getcontext().prec = 60

    def phi(z: Decimal) -> Decimal:
        term = total = z
        for n in range(1, 400):
            term = term * -z * z * (2 * n - 1) / (2 * n * (2 * n + 1))
            total += term
        pi = Decimal("3.14159265358979323846264338327950288419716939937510582097494")
        return Decimal("0.5") + total / (2 * pi).sqrt()

    for sigma, epsilon in ((Decimal(2), Decimal("0.5")), (Decimal(50), Decimal("0.01"))):
        half = 1 / (2 * sigma)
        exact = phi(half - epsilon * sigma) - epsilon.exp() * phi(-half - epsilon * sigma)
        ours = theorem_delta(float(epsilon), float(sigma), dimension=1, batch_clip=1.0)
        assert ours == pytest.approx(float(exact), rel=1e-12)


@pytest.mark.parametrize("d", [2, 10, 1000, 10**6])
@pytest.mark.parametrize("sigma", [0.3, 0.5, 1.0, 3.0])
@pytest.mark.parametrize("clip", [0.5, 1.0, 10.0])
def test_log_space_agrees_with_the_printed_formula(d: int, sigma: float, clip: float) -> None:
    for epsilon in (0.01, 0.3, 1.0):
        plain = printed_formula(epsilon, sigma, d, clip)
        ours = theorem_delta(epsilon, sigma, dimension=d, batch_clip=clip)
        assert ours == pytest.approx(max(plain, 0.0), rel=1e-9, abs=1e-13)


def test_stable_over_the_whole_promised_range() -> None:
    sigmas = np.geomspace(1e-3, 1e4, 200)
    for d in (1, 2, 10**4, 10**8, 10**12):
        for clip in (1e-2, 1.0, 1e3):
            for epsilon in (1e-6, 0.1, 10.0, 1e5):
                values = log_delta(epsilon, sigmas, dimension=d, batch_clip=clip)
                assert not np.isnan(values).any()
                assert (values <= 0.0).all()


def test_delta_far_below_the_smallest_float_is_still_ordered() -> None:
    values = log_delta([5.0, 6.0, 7.0], 10.0, dimension=1, batch_clip=1.0)
    assert values[0] < math.log(1e-300)
    assert values[0] > values[1] > values[2] > -math.inf


@given(
    epsilon=st.floats(0.01, 3.0),
    log_target=st.floats(-25.0, -3.0),
    d=st.sampled_from([1, 2, 50, 10**5, 10**9]),
    clip=st.sampled_from([0.1, 1.0, 10.0, 100.0]),
)
def test_delta_stays_at_or_below_target_above_sigma(
    epsilon: float, log_target: float, d: int, clip: float
) -> None:
    target = math.exp(log_target)
    sigma = smallest_sigma(epsilon, target, dimension=d, batch_clip=clip)
    above = sigma * np.geomspace(1.0, 1e4, 3000)
    limit = log_target + 1e-9
    assert (log_delta(epsilon, above, dimension=d, batch_clip=clip) <= limit).all()
    assert theorem_delta(epsilon, sigma * (1 - 1e-6), dimension=d, batch_clip=clip) > target


def test_of_several_crossings_the_last_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in with a quiet valley at small σ: stopping in it would be absurd."""

    def two_humps(epsilon: float, sigma: np.ndarray, **_: object) -> np.ndarray:
        x = np.log10(sigma)
        return -20.0 + 15.0 * np.exp(-((x + 2.0) ** 2)) + 15.0 * np.exp(-((x - 1.0) ** 2) / 0.1)

    monkeypatch.setattr(theorem, "log_delta", two_humps)
    found = smallest_sigma(1.0, math.exp(-10.0), dimension=5, batch_clip=1.0)
    assert 10.0 < found < 30.0
    assert two_humps(1.0, np.array(found)) == pytest.approx(-10.0, abs=1e-6)
    assert two_humps(1.0, np.array(1.0)) < -10.0


@pytest.mark.parametrize("d", [1, 100, 10**8])
def test_epsilon_and_sigma_invert_each_other(d: int) -> None:
    sigma = smallest_sigma(0.5, 1e-7, dimension=d, batch_clip=1.0)
    assert smallest_epsilon(sigma, 1e-7, dimension=d, batch_clip=1.0) == pytest.approx(
        0.5, rel=1e-6
    )


@pytest.mark.parametrize(
    ("d", "clip", "argument"),
    [(0, 1.0, "dimension"), (10**13, 1.0, "dimension"), (5, 0.0, "batch_clip")],
)
def test_what_the_theorem_does_not_speak_about_is_refused(
    d: int, clip: float, argument: str
) -> None:
    with pytest.raises(InvalidArgumentError) as refusal:
        theorem_delta(1.0, 1.0, dimension=d, batch_clip=clip)
    assert refusal.value.argument == argument
    assert refusal.value.remedy


def test_a_budget_that_no_noise_reaches_is_named() -> None:
    with pytest.raises(InvalidArgumentError, match="noise multiplier up to"):
        smallest_sigma(1e-9, 1e-300, dimension=1, batch_clip=1.0)
    with pytest.raises(InvalidArgumentError, match="at least"):
        smallest_sigma(1e9, 1e-5, dimension=1, batch_clip=1.0)
