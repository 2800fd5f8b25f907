"""The true δ of shuffled pairs: closed forms and brute force agree."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from shuffled_dpsgd.accounting.theorem import theorem_delta
from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd_experiments.examination.exact import DeltaEstimate, exact_delta, examine_pair
from shuffled_dpsgd_experiments.examination.pairs import constant_pair, spike_pair


def spike_losses(dimension: int, clip: float, sigma: float, draws: int, seed: int) -> np.ndarray:
    """Losses of the spike pair from all d coordinates drawn, world first."""
    rng = np.random.default_rng(seed)
    unit = np.full(dimension, -1.0)
    unit[0] = dimension - 1
    unit /= math.sqrt(dimension * (dimension - 1))
    losses = np.empty(draws)
    for index in range(draws):
        y = clip * unit + sigma * rng.standard_normal(dimension)
        # <y, f^(i)> for every place i of the spike.
        product = (dimension * y - y.sum()) / math.sqrt(dimension * (dimension - 1))
        density = []
        for length in (clip, clip + 1.0):
            exponent = length * product / sigma**2
            peak = exponent.max()
            total = peak + np.log(np.exp(exponent - peak).sum())
            density.append(total - length**2 / (2 * sigma**2))
        losses[index] = density[0] - density[1]
    return losses


def mean_delta(losses: np.ndarray, epsilon: float) -> float:
    return float(-np.expm1(np.minimum(epsilon - losses, 0.0)).mean())


def overlap(estimate: DeltaEstimate, value: float, slack: float) -> bool:
    return estimate.low - slack <= value <= estimate.high + slack


@pytest.mark.parametrize(("clip", "sigma"), [(1.0, 0.4), (10.0, 1.0), (1.0, 1.0)])
def test_the_spike_pair_agrees_with_drawing_every_coordinate(clip: float, sigma: float) -> None:
    pair = spike_pair(5000, clip)
    found = exact_delta(pair, noise_multiplier=sigma, epsilons=[0.1, 0.5], draws=6000)
    brute = spike_losses(5000, clip, sigma, 2000, seed=11)
    for estimate in found["first"]:
        assert overlap(estimate, mean_delta(brute, estimate.epsilon), slack=0.02)


@pytest.mark.parametrize("dimension", [1, 7, 10**9])
def test_constant_vectors_keep_the_full_gaussian_delta(dimension: int) -> None:
    found = exact_delta(constant_pair(dimension, 1.0), noise_multiplier=0.7, epsilons=[0.5])
    exact = theorem_delta(0.5, 0.7, dimension=1, batch_clip=1.0)
    for world in ("first", "second"):
        (estimate,) = found[world]  # type: ignore[index]
        assert estimate.kind == "proven"
        assert estimate.low == estimate.delta == estimate.high == pytest.approx(exact, rel=1e-6)


def test_shuffling_never_makes_a_pair_easier_to_tell_apart() -> None:
    """Post-processing: every true δ stays below the unshuffled Gaussian's at the same distance."""
    for dimension, clip, sigma in ((50, 1.0, 0.5), (10**6, 10.0, 0.9), (10**9, 100.0, 2.2)):
        found = exact_delta(
            spike_pair(dimension, clip),
            noise_multiplier=sigma,
            epsilons=[0.0, 0.4, 2.0],
            draws=4000,
        )
        for estimate in itertools.chain(*found.values()):
            limit = theorem_delta(estimate.epsilon, sigma, dimension=1, batch_clip=1.0)
            assert estimate.low <= limit


def test_intervals_cover_at_the_stated_confidence() -> None:
    pair, sigma = spike_pair(300, 1.0), 0.6
    truth = exact_delta(pair, noise_multiplier=sigma, epsilons=[0.3], draws=50_000)["first"][0]
    hits = 0
    for seed in range(20):
        found = exact_delta(pair, noise_multiplier=sigma, epsilons=[0.3], draws=500, seed=seed + 1)
        hits += found["first"][0].low <= truth.delta <= found["first"][0].high
    assert hits >= 19


def test_a_true_claim_is_not_refuted() -> None:
    exact = theorem_delta(0.5, 2.0, dimension=1, batch_clip=1.0)
    fair = examine_pair(
        spike_pair(1000, 1.0), noise_multiplier=2.0, step_epsilon=0.5, step_delta=exact
    )
    assert not fair.refuted
    assert "not refuted" in fair.verdict


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"noise_multiplier": 0.0}, "noise_multiplier"),
        ({"draws": 1}, "draws"),
        ({"confidence": 1.0}, "confidence"),
    ],
)
def test_impossible_requests_name_the_argument(change: dict[str, float], argument: str) -> None:
    with pytest.raises(InvalidArgumentError) as refusal:
        exact_delta(spike_pair(10, 1.0), **{"noise_multiplier": 1.0, "epsilons": [1.0], **change})  # type: ignore[arg-type]
    assert refusal.value.argument == argument


def test_a_spike_needs_two_coordinates() -> None:
    with pytest.raises(InvalidArgumentError):
        spike_pair(1, 1.0)
