"""The true δ of shuffled pairs: closed forms, brute force, and permanents agree."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest

from shuffled_dpsgd.accounting import (
    DeltaEstimate,
    constant_pair,
    exact_delta,
    examine_pair,
    spike_pair,
    vector_pair,
)
from shuffled_dpsgd.accounting.pairs import ArbitraryPair, OneOddPair
from shuffled_dpsgd.accounting.theorem import theorem_delta
from shuffled_dpsgd.errors import InvalidArgumentError


def brute_losses(
    here: np.ndarray, there: np.ndarray, sigma: float, draws: int, seed: int
) -> np.ndarray:
    """Losses with every distinct arrangement written out."""
    rng = np.random.default_rng(seed)
    y = here + sigma * rng.standard_normal((draws, here.size))

    def log_density(f: np.ndarray) -> np.ndarray:
        arrangements = np.array(sorted(set(itertools.permutations(f))))
        exponents = -((y[:, None, :] - arrangements) ** 2).sum(axis=2) / (2 * sigma**2)
        peak = exponents.max(axis=1)
        return peak + np.log(np.exp(exponents - peak[:, None]).mean(axis=1))

    return log_density(here) - log_density(there)


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


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ([2.0, 0.0, 0.0, 0.0], [3.0, 0.0, 0.0, 0.0]),
        ([1.0, 0.5, 0.5, 0.5], [-1.0, 0.2, 0.2, 0.2]),
        ([1.0, -0.5, 0.3, 0.0], [0.6, -0.9, 0.2, 0.4]),
    ],
)
def test_given_vectors_agree_with_every_arrangement_written_out(
    first: Sequence[float], second: Sequence[float]
) -> None:
    found = exact_delta(
        vector_pair(first, second), noise_multiplier=0.8, epsilons=[0.2, 1.0], draws=10_000
    )
    worlds = {"first": (first, second), "second": (second, first)}
    for world, (here, there) in worlds.items():
        brute = brute_losses(np.array(here), np.array(there), 0.8, 10_000, seed=2)
        for estimate in found[world]:  # type: ignore[index]
            assert overlap(estimate, mean_delta(brute, estimate.epsilon), slack=0.01)


def test_one_odd_entry_is_recognised_at_any_length() -> None:
    assert isinstance(vector_pair([0.0] * 99 + [3.0], [0.0] * 99 + [4.0]), OneOddPair)
    assert isinstance(vector_pair([1.0, 2.0, 3.0], [0.0, 0.0, 1.0]), ArbitraryPair)
    for refused in (list(range(20)), [1.0] * 7 + [0.0] * 7):
        with pytest.raises(InvalidArgumentError, match="permanent"):
            vector_pair(refused, [0.0] * len(refused))
    with pytest.raises(InvalidArgumentError, match="same length"):
        vector_pair([1.0], [1.0, 2.0])
    with pytest.raises(InvalidArgumentError, match="finite"):
        vector_pair([math.nan], [1.0])


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


def test_identical_vectors_cannot_be_told_apart() -> None:
    same = exact_delta(vector_pair([1.0, 1.0], [1.0, 1.0]), noise_multiplier=1.0, epsilons=[0.0])
    assert same["first"][0].delta == 0.0
    swapped = exact_delta(vector_pair([2.0, 0.0], [0.0, 2.0]), noise_multiplier=1.0, epsilons=[0.0])
    assert swapped["first"][0].delta == pytest.approx(0.0, abs=1e-9)


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
