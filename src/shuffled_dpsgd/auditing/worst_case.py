"""The theorem's worst-case pair under an ideal shuffle: one spike among d coordinates.

Without the canary the sum is a spike of height `batch_clip`, with it one of `batch_clip` + 1, at a
uniform place among d (Lemma of Theorem 3, up to an offset of order 1/d on every coordinate). The
largest of d normal values is drawn exactly by inversion, so d = 85.8M costs one uniform number.
The pair is the theorem's: its second sum is longer than the batch clip, so it is a counterexample
to Theorem 3 as stated rather than two batches that Algorithm 1 would release.
"""

from __future__ import annotations

import numpy as np
from scipy.special import ndtri

from shuffled_dpsgd.accounting.order_statistics import draw_sums
from shuffled_dpsgd.auditing.estimators.scores import Floats, ScorePair
from shuffled_dpsgd.auditing.verdict import Evidence, ThreatModel


def largest_of_normals(count: int, size: int, rng: np.random.Generator) -> Floats:
    """`size` exact draws of the largest of `count` standard normals.

    P[max ≤ x] = Φ(x)^count, so x = Φ⁻¹(U^(1/count)); the upper tail 1 − U^(1/count) is formed
    without cancellation.

    >>> bool(5.2 < largest_of_normals(85_800_000, 100, np.random.default_rng(0)).mean() < 6.2)
    True
    """
    upper_tail = -np.expm1(np.log(rng.random(size)) / count)
    drawn: Floats = -ndtri(upper_tail)
    return drawn


def spike_maximum(
    height: float, dimension: int, size: int, noise_std: float, rng: np.random.Generator
) -> Floats:
    """Largest coordinate of a shuffled noisy spike: it does not depend on where the spike went."""
    at_spike = height + noise_std * rng.standard_normal(size)
    elsewhere = noise_std * largest_of_normals(dimension - 1, size, rng)
    return np.maximum(at_spike, elsewhere)


def spike_log_ratio(
    height: float,
    heights: tuple[float, float],
    dimension: int,
    size: int,
    noise_std: float,
    rng: np.random.Generator,
) -> Floats:
    """Log likelihood ratio of a spike of `heights[1]` against one of `heights[0]`, both shuffled.

    The truth has height `height`. Sums over the d − 1 other coordinates come from the accountant's
    order-statistics sampler.
    """
    slopes = np.array(heights) / noise_std
    elsewhere = draw_sums(dimension - 1, tuple(slopes), size, rng).log_exponential
    at_spike = height / noise_std + rng.standard_normal(size)
    sums = np.logaddexp(elsewhere, at_spike[:, None] * slopes) - 0.5 * slopes**2
    ratio: Floats = sums[:, 1] - sums[:, 0]
    return ratio


def worst_case_evidence(
    *,
    noise_multiplier: float,
    dimension: int,
    batch_clip: float,
    num_observations: int,
    rng: np.random.Generator,
) -> list[Evidence]:
    """Maximum, and exact likelihood ratio, over all d coordinates of the theorem's own pair."""
    heights = (batch_clip, batch_clip + 1.0)
    maxima = [
        spike_maximum(height, dimension, num_observations, noise_multiplier, rng)
        for height in heights
    ]
    ratios = [
        spike_log_ratio(height, heights, dimension, num_observations, noise_multiplier, rng)
        for height in heights
    ]
    return [
        Evidence(
            adversary=f"{name}, ideal shuffle",
            canary="worst-case pair",
            threat_model=ThreatModel.STEP_GRADIENTS,
            scores=ScorePair(out=scores[0], present=scores[1]),
        )
        for name, scores in (("orbit maximum", maxima), ("orbit likelihood ratio", ratios))
    ]
