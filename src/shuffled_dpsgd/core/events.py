"""The facts of a training run that decide its privacy, as frozen data that accountants price.

Describing the mechanism and pricing it are kept apart: a `SampledGaussian` says what was done, an
accountant says what that is worth, or refuses.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, get_args

from shuffled_dpsgd.core.claim import Adjacency
from shuffled_dpsgd.errors import require

SMALLEST_DELTA = 1e-30


@dataclass(frozen=True, kw_only=True)
class SampledGaussian:
    """`num_steps` releases of a Poisson-sampled sum plus Gaussian noise, as in DP-SGD.

    Every example joins a step independently with probability `sampling_prob`; its contribution has
    norm at most `clip_norm`; the noise has standard deviation `noise_multiplier * clip_norm` in
    every coordinate. Where blocks of coordinates received different noise, `noise_multiplier` is
    the smallest of them: the joint release is a post-processing of the mechanism with that noise
    everywhere (add independent noise to the other blocks).

    Of a draw of more than `largest_batch` out of `dataset_size`, so many take part, chosen by
    chance. Only accountants that know of it may price such a run. With `steps_per_block`, a release
    is a block of so many steps of training (`banded`), and nothing is said of groups.
    """

    noise_multiplier: float
    sampling_prob: float
    num_steps: int
    adjacency: Adjacency = "add-remove"
    largest_batch: int | None = None
    dataset_size: int | None = None
    steps_per_block: int | None = None

    def __post_init__(self) -> None:
        check_noise_multiplier(self.noise_multiplier)
        check_sampling(self.sampling_prob, self.num_steps)
        expected = f"one of {get_args(Adjacency)}"
        require(self.adjacency in get_args(Adjacency), "adjacency", expected, self.adjacency)
        if self.largest_batch is not None:
            most, size, q = self.largest_batch, self.dataset_size or 0, self.sampling_prob
            is_fine = q < 1.0 and q * size < most + 0.5 and most < size
            expected = f"from the expected batch {q * size:g} to less than dataset_size {size}"
            require(is_fine, "largest_batch", expected, most)

    def to_json(self) -> dict[str, Any]:
        """Plain data for a claim's inputs."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def check_delta(delta: float) -> None:
    """Refuse a δ outside (0, 1), or so small that nobody has compared its ε with another method."""
    expected = f"a number from {SMALLEST_DELTA:g} to less than 1"
    is_fine, remedy = SMALLEST_DELTA <= delta < 1.0, "use less than one over the data-set size"
    require(is_fine, "delta", expected, delta, remedy)


def check_noise_multiplier(noise_multiplier: float) -> None:
    """Refuse noise that is negative or not a number; zero is allowed and protects nothing."""
    remedy = "`shuffled-dpsgd calibrate` finds one for a target epsilon"
    is_fine = math.isfinite(noise_multiplier) and noise_multiplier >= 0.0
    require(is_fine, "noise_multiplier", "a finite number >= 0", noise_multiplier, remedy)


def check_sampling(sampling_prob: float, num_steps: int) -> None:
    """Refuse a sampling probability outside (0, 1] or fewer than one step."""
    remedy = "it is the expected batch size over the data-set size"
    expected = "a probability in (0, 1]"
    require(0.0 < sampling_prob <= 1.0, "sampling_prob", expected, sampling_prob, remedy)
    remedy = "a run without a step releases nothing and needs no accounting"
    is_fine = 1 <= num_steps < math.inf and num_steps == int(num_steps)
    require(is_fine, "num_steps", "a whole number of steps, at least 1", num_steps, remedy)
