"""The facts of a training run that decide its privacy, as frozen data that accountants price.

Describing the mechanism and pricing it are kept apart: a `SampledGaussian` says what was done, an
accountant says what that is worth, or refuses.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, get_args

from shuffled_dpsgd.core.claim import Adjacency
from shuffled_dpsgd.errors import InvalidArgumentError

SMALLEST_DELTA = 1e-30


@dataclass(frozen=True, kw_only=True)
class SampledGaussian:
    """`num_steps` releases of a Poisson-sampled sum plus Gaussian noise, as in DP-SGD.

    Every example joins a step independently with probability `sampling_prob`; its contribution has
    norm at most `clip_norm`; the noise has standard deviation `noise_multiplier * clip_norm` in
    every coordinate. Where blocks of coordinates received different noise, `noise_multiplier` is
    the smallest of them: the joint release is a post-processing of the mechanism with that noise
    everywhere (add independent noise to the other blocks).
    """

    noise_multiplier: float
    sampling_prob: float
    num_steps: int
    adjacency: Adjacency = "add-remove"

    def __post_init__(self) -> None:
        check_noise_multiplier(self.noise_multiplier)
        check_sampling(self.sampling_prob, self.num_steps)
        if self.adjacency not in get_args(Adjacency):
            expected = f"one of {get_args(Adjacency)}"
            raise InvalidArgumentError("adjacency", expected=expected, got=self.adjacency)

    def to_json(self) -> dict[str, Any]:
        """Plain data for a claim's inputs."""
        return asdict(self)


def check_delta(delta: float) -> None:
    """Refuse a δ outside (0, 1), or so small that nobody has compared its ε with another method."""
    if not SMALLEST_DELTA <= delta < 1.0:
        raise InvalidArgumentError(
            "delta",
            expected=f"a number from {SMALLEST_DELTA:g} to less than 1",
            got=delta,
            remedy="use less than one over the data-set size",
        )


def check_noise_multiplier(noise_multiplier: float) -> None:
    """Refuse noise that is negative or not a number; zero is allowed and protects nothing."""
    if not (math.isfinite(noise_multiplier) and noise_multiplier >= 0.0):
        raise InvalidArgumentError(
            "noise_multiplier",
            expected="a finite number >= 0",
            got=noise_multiplier,
            remedy="`shuffled-dpsgd calibrate` finds one for a target epsilon",
        )


def check_sampling(sampling_prob: float, num_steps: int) -> None:
    """Refuse a sampling probability outside (0, 1] or fewer than one step."""
    if not 0.0 < sampling_prob <= 1.0:
        raise InvalidArgumentError(
            "sampling_prob",
            expected="a probability in (0, 1]",
            got=sampling_prob,
            remedy="it is the expected batch size over the data-set size",
        )
    if not 1 <= num_steps < math.inf or num_steps != int(num_steps):
        raise InvalidArgumentError(
            "num_steps",
            expected="a whole number of steps, at least 1",
            got=num_steps,
            remedy="a run without a step releases nothing and needs no accounting",
        )
