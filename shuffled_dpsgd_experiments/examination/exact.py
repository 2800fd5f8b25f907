"""The true δ(ε) of a shuffled Gaussian on a pair of vectors, against what is claimed for it.

δ(ε) = E_p[(1 − e^{ε − log p/p'})₊] is the mean of a quantity in [0, 1] whose likelihood ratio is
known exactly, so draws estimate it without bias and the empirical Bernstein inequality (Maurer &
Pontil 2009) bounds the error at any sample size. Where shuffling changes neither vector the value
is closed-form.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from shuffled_dpsgd.accounting.theorem import theorem_delta
from shuffled_dpsgd.core.claim import Kind
from shuffled_dpsgd.errors import InvalidArgumentError, require
from shuffled_dpsgd_experiments.examination.pairs import WORLDS, Array, Pair, World

DRAWS = 20_000
CONFIDENCE = 0.95


@dataclass(frozen=True, kw_only=True)
class DeltaEstimate:
    """δ(ε) in one direction with a confidence interval; `world` is the one drawn from.

    "measured" when estimated from draws, "proven" where closed-form, with low = high.
    """

    epsilon: float
    world: World
    delta: float
    low: float
    high: float
    confidence: float
    kind: Kind

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Examination:
    """A claimed (ε, δ) of one step set against the truth on one pair, in both directions."""

    pair: str
    dimension: int
    noise_multiplier: float
    claimed_epsilon: float
    claimed_delta: float
    truth: tuple[DeltaEstimate, DeltaEstimate]

    @property
    def refuted(self) -> bool:
        """Whether the truth exceeds the claim at the stated confidence in some direction."""
        return any(each.low > self.claimed_delta for each in self.truth)

    @property
    def verdict(self) -> str:
        """`claim refuted`, or that this pair does not refute it, which is no confirmation."""
        return "claim refuted" if self.refuted else "not refuted by this pair"

    def to_json(self) -> dict[str, Any]:
        """Plain data with the verdict."""
        return asdict(self) | {"claimed_kind": "heuristic", "verdict": self.verdict}


def exact_delta(
    pair: Pair,
    *,
    noise_multiplier: float,
    epsilons: Sequence[float],
    draws: int = DRAWS,
    confidence: float = CONFIDENCE,
    seed: int = 0,
) -> dict[World, list[DeltaEstimate]]:
    """δ(ε) at each ε in both directions, every ε from the same draws.

    Each interval holds with probability `confidence` on its own, not all of them jointly.
    """
    _check(noise_multiplier, draws, confidence)
    result: dict[World, list[DeltaEstimate]] = {}
    for index, world in enumerate(WORLDS):
        if pair.constant_distance is not None:
            sigma = noise_multiplier / pair.constant_distance
            found = [_closed_form(epsilon, sigma) for epsilon in epsilons]
        else:
            rng = np.random.default_rng([seed, index])
            losses = pair.draw_losses(world, noise_multiplier, draws, rng)
            found = [_estimate(epsilon, losses, confidence) for epsilon in epsilons]
        result[world] = [
            DeltaEstimate(epsilon=epsilon, world=world, **each)
            for epsilon, each in zip(epsilons, found, strict=True)
        ]
    return result


def examine_pair(
    pair: Pair,
    *,
    noise_multiplier: float,
    step_epsilon: float,
    step_delta: float,
    draws: int = DRAWS,
    confidence: float = CONFIDENCE,
    seed: int = 0,
) -> Examination:
    """Hold the claim that one step is (`step_epsilon`, `step_delta`)-private against a pair."""
    truth = exact_delta(
        pair,
        noise_multiplier=noise_multiplier,
        epsilons=[step_epsilon],
        draws=draws,
        confidence=confidence,
        seed=seed,
    )
    return Examination(
        pair=pair.name,
        dimension=pair.dimension,
        noise_multiplier=noise_multiplier,
        claimed_epsilon=step_epsilon,
        claimed_delta=step_delta,
        truth=(truth["first"][0], truth["second"][0]),
    )


def _estimate(epsilon: float, losses: Array, confidence: float) -> dict[str, Any]:
    values = -np.expm1(np.minimum(epsilon - losses, 0.0))
    mean, count = float(values.mean()), values.size
    tail = math.log(4.0 / (1.0 - confidence))
    variance = float(values.var(ddof=1))
    half = math.sqrt(2.0 * variance * tail / count) + 7.0 * tail / (3.0 * (count - 1))
    ends = {"low": max(mean - half, 0.0), "high": min(mean + half, 1.0)}
    return {"delta": mean, **ends, "confidence": confidence, "kind": "measured"}


def _closed_form(epsilon: float, sigma: float) -> dict[str, Any]:
    """The exact Gaussian mechanism."""
    delta = theorem_delta(epsilon, sigma, dimension=1, batch_clip=1.0)
    return {"delta": delta, "low": delta, "high": delta, "confidence": 1.0, "kind": "proven"}


def _check(noise_multiplier: float, draws: int, confidence: float) -> None:
    if not (math.isfinite(noise_multiplier) and noise_multiplier > 0.0):
        raise InvalidArgumentError(
            "noise_multiplier",
            expected="a positive number",
            got=noise_multiplier,
            remedy="without noise any two vectors that differ beyond order are told apart",
        )
    if draws < 2:
        raise InvalidArgumentError("draws", expected="at least 2", got=draws, remedy="use 20000")
    require(0.0 < confidence < 1.0, "confidence", "a number strictly between 0 and 1", confidence)
