"""The facts of a training run that decide its privacy, as frozen data that accountants price.

Describing the mechanism and pricing it are kept apart: a `SampledGaussian` says what was done, an
accountant says what that is worth, or refuses.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, get_args

from shuffled_dpsgd.core.claim import Adjacency
from shuffled_dpsgd.errors import InvalidArgumentError


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
        check_adjacency(self.adjacency)

    def to_dp_event(self) -> Any:
        """The same facts as a `dp_accounting.DpEvent`, for accountants outside this package."""
        import dp_accounting

        gaussian = dp_accounting.GaussianDpEvent(self.noise_multiplier)
        sampled = dp_accounting.PoissonSampledDpEvent(self.sampling_prob, gaussian)
        return dp_accounting.SelfComposedDpEvent(sampled, self.num_steps)

    def to_json(self) -> dict[str, Any]:
        """Plain data for a claim's inputs."""
        return {
            "noise_multiplier": self.noise_multiplier,
            "sampling_prob": self.sampling_prob,
            "num_steps": self.num_steps,
            "adjacency": self.adjacency,
        }


def check_epsilon(epsilon: float) -> None:
    """Refuse a target ε that is not a positive finite number."""
    if not (math.isfinite(epsilon) and epsilon > 0.0):
        raise InvalidArgumentError(
            "epsilon",
            expected="a positive finite number",
            got=epsilon,
            remedy="typical budgets lie between 0.1 and 10",
        )


def check_delta(delta: float) -> None:
    """Refuse a δ outside (0, 1)."""
    if not 0.0 < delta < 1.0:
        raise InvalidArgumentError(
            "delta",
            expected="a number strictly between 0 and 1",
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
    if num_steps != int(num_steps) or num_steps < 1:
        raise InvalidArgumentError(
            "num_steps",
            expected="a whole number of steps, at least 1",
            got=num_steps,
            remedy="a run without a step releases nothing and needs no accounting",
        )


def check_adjacency(adjacency: str) -> None:
    """Refuse a neighbouring relation nobody here prices."""
    if adjacency not in get_args(Adjacency):
        raise InvalidArgumentError(
            "adjacency", expected=f"one of {get_args(Adjacency)}", got=adjacency
        )
