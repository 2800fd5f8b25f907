"""Normal numbers on the CPU: the right distribution, tails included, and no bit left to chance."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from shuffled_dpsgd.training.box_muller import standard_normal

FLOAT32 = np.dtype(np.float32)


def check_normal(drawn: np.ndarray) -> None:
    """Moments, tail counts and neighbours of many numbers, each within five standard errors."""
    n = drawn.size
    assert abs(drawn.mean()) < 5 / math.sqrt(n)
    assert abs(drawn.var() - 1) < 5 * math.sqrt(2 / n)
    assert abs((drawn**3).mean()) < 5 * math.sqrt(15 / n)
    assert abs((drawn**4).mean() - 3) < 5 * math.sqrt(96 / n)
    for threshold in (1.0, 2.0, 3.0, 4.0):
        share = 2 * stats.norm.sf(threshold)
        found = int((np.abs(drawn) > threshold).sum())
        assert abs(found - n * share) < 5 * math.sqrt(n * share)
    for lag in (1, 2, n // 2):
        # Products and products of squares: Box-Muller's pairs share a radius.
        a, b = drawn[:-lag], drawn[lag:]
        assert abs((a * b).mean()) < 5 / math.sqrt(a.size)
        assert abs(((a * a - 1) * (b * b - 1)).mean()) < 5 * 2 / math.sqrt(a.size)
    assert stats.kstest(drawn[:200_000], "norm").pvalue > 1e-4


def test_float32_numbers_are_normal() -> None:
    rng = np.random.Generator(np.random.Philox(3))
    drawn = np.concatenate([standard_normal(rng, 1 << 17, FLOAT32) for _ in range(16)])
    assert drawn.dtype == np.float32
    check_normal(drawn.astype(np.float64))


@pytest.mark.slow
def test_float32_tails_are_normal() -> None:
    rng = np.random.Generator(np.random.Philox(4))
    beyond = np.zeros(3)
    for _ in range(3000):
        drawn = np.abs(standard_normal(rng, 1 << 17, FLOAT32))
        beyond += [(drawn > t).sum() for t in (4.0, 5.0, 5.5)]
    expected = 3000 * (1 << 17) * 2 * stats.norm.sf([4.0, 5.0, 5.5])
    assert (np.abs(beyond - expected) < 5 * np.sqrt(expected)).all()


class Scripted:
    """Hands out the words it was given."""

    def __init__(self, *answers: list[int]) -> None:
        self._answers = [np.array(answer, dtype=np.uint64) for answer in answers]

    def integers(self, *args: object, size: int, **options: object) -> np.ndarray:
        answer = self._answers.pop(0)
        assert answer.size == size
        return answer


@pytest.mark.parametrize(
    ("finer", "radius"),
    [(0, math.sqrt(2 * 96 * math.log(2))), (1 << 63, math.sqrt(2 * 32 * math.log(2)))],
)
def test_the_smallest_words_are_refined_and_reach_far_out(finer: int, radius: float) -> None:
    """The low half of the words makes radii, the high half angles; an angle of 0 keeps all of r."""
    numbers = standard_normal(Scripted([0 | (1 << 63), 0], [finer]), 4, FLOAT32)  # type: ignore[arg-type]
    assert numbers[0] == pytest.approx(radius, rel=1e-6)
    assert numbers[1] == pytest.approx(math.sqrt(2 * math.log(2)), rel=1e-6)
    assert np.isfinite(numbers).all()


def test_the_largest_word_gives_zero_and_not_nothing() -> None:
    everything = (1 << 64) - 1
    numbers = standard_normal(Scripted([everything]), 2, FLOAT32)  # type: ignore[arg-type]
    assert np.abs(numbers).max() < 1e-3


@pytest.mark.parametrize("size", [0, 1, 2, 7])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_any_size_repeats_with_the_seed(size: int, dtype: type) -> None:
    first, again = (
        standard_normal(np.random.Generator(np.random.Philox(1)), size, np.dtype(dtype))
        for _ in range(2)
    )
    assert first.size == size
    assert first.dtype == dtype
    assert (first == again).all()
