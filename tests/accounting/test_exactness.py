"""The certified ε is attained: priced a second time, from nothing but the densities of the pair."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.signal import fftconvolve
from scipy.stats import norm

from shuffled_dpsgd.accounting import certified_bracket, certified_claim
from shuffled_dpsgd.accounting.bracket import STATEMENT, is_exact
from shuffled_dpsgd.accounting.theorem import smallest_epsilon


def composed_delta(
    epsilon: float, *, noise: float, sampling_prob: float, num_steps: int, spacing: float
) -> float:
    """δ(ε) of T independent draws of (1−q)·N(0, σ²) + q·N(1, σ²) against N(0, σ²).

    The law of one step's log likelihood ratio on a grid, convolved with itself by squaring;
    no accountant is involved. Every loss goes to the nearest grid point.
    """
    edges = np.arange(math.floor(math.log1p(-sampling_prob) / spacing), 40_000) + 0.5
    ratio = np.expm1(np.clip(edges * spacing, None, 600.0)) / sampling_prob + 1.0
    with np.errstate(divide="ignore", invalid="ignore"):
        at = np.where(ratio > 0.0, noise**2 * np.log(np.maximum(ratio, 1e-300)) + 0.5, -np.inf)
    cdf = (1 - sampling_prob) * norm.cdf(at / noise) + sampling_prob * norm.cdf((at - 1) / noise)
    step, first = np.diff(cdf), int(edges[0] + 0.5)
    kept = np.flatnonzero(step > 1e-18)
    step, first = step[kept[0] : kept[-1] + 1], first + int(kept[0])
    total, total_first = np.ones(1), 0
    while num_steps:
        if num_steps & 1:
            total, total_first = trimmed(fftconvolve(total, step), total_first + first)
        num_steps >>= 1
        if num_steps:
            step, first = trimmed(fftconvolve(step, step), 2 * first)
    losses = spacing * (total_first + np.arange(total.size))
    return float((total * -np.expm1(np.minimum(epsilon - losses, 0.0))).sum())


def trimmed(mass: np.ndarray, first: int) -> tuple[np.ndarray, int]:
    """Without the tails that rounding of the transform makes up anyway."""
    kept = np.flatnonzero(mass > 1e-15)
    return np.maximum(mass[kept[0] : kept[-1] + 1], 0.0), first + int(kept[0])


@pytest.mark.parametrize(
    ("noise", "num_steps", "spacing"), [(2.329, 500, 2e-4), (1.946, 500, 2e-4), (0.746, 50, 1e-3)]
)
def test_the_pair_attains_the_certified_epsilon(
    noise: float, num_steps: int, spacing: float
) -> None:
    """At 0.3 % less than the certified ε the pair's own δ is above the claimed one."""
    run = {"noise_multiplier": noise, "sampling_prob": 0.02, "num_steps": num_steps}
    certified = certified_claim(**run, delta=5e-6).epsilon
    pair = {"noise": noise, "sampling_prob": 0.02, "num_steps": num_steps, "spacing": spacing}
    assert composed_delta(0.997 * certified, **pair) > 5e-6
    assert composed_delta(1.003 * certified, **pair) < 5e-6


def test_one_step_is_the_closed_form() -> None:
    closed = smallest_epsilon(0.274, 2.5e-7, dimension=1, batch_clip=1.0)
    step = {"noise_multiplier": 0.274, "sampling_prob": 1.0, "num_steps": 1, "delta": 2.5e-7}
    assert closed == pytest.approx(24.378, abs=1e-3)
    assert certified_claim(**step).epsilon == pytest.approx(closed, rel=2e-4)
    bracket = certified_bracket(**step)
    assert bracket.lower <= closed <= bracket.upper * (1 + 2e-4)


def test_the_statement_is_made_only_where_it_is_proven() -> None:
    covered = {
        "clip": "flat",
        "clip_norm": 1.0,
        "batch_clip_norm": 1.0,
        "adjacency": "add-remove",
        "shows_sums": True,
    }
    assert is_exact(**covered)
    assert is_exact(**{**covered, "batch_clip_norm": None})
    for change in (
        {"clip": "per-layer"},
        {"clip": "automatic"},
        {"batch_clip_norm": 0.5},
        {"adjacency": "replace-one"},
        {"shows_sums": False},
    ):
        assert not is_exact(**{**covered, **change})
    assert "no accountant that knows only clip, sampling rate, noise and steps" in STATEMENT
