"""Gradient canaries on one permuted axis: unit vectors an adversary would plant.

Scaled by `clip_norm`, each is a contribution that per-sample clipping lets through whole. How well
a canary survives the shuffle depends on its shape alone, so these are plain vectors; the
tensors of a real model are filled from them in `model_canaries`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shuffled_dpsgd.auditing.estimators.scores import Floats
from shuffled_dpsgd.errors import InvalidArgumentError


@dataclass(frozen=True, kw_only=True)
class AxisCanary:
    """A unit vector along an axis that is permuted as a whole."""

    name: str
    vector: Floats

    def __post_init__(self) -> None:
        vector = np.asarray(self.vector, dtype=np.float64)
        if vector.ndim != 1 or vector.size < 2 or not np.isfinite(vector).all():
            raise InvalidArgumentError(
                "vector", expected="at least two finite entries in one row", got=vector.shape
            )
        norm = float(np.linalg.norm(vector))
        if not np.isclose(norm, 1.0):
            raise InvalidArgumentError(
                "vector", expected="norm 1", got=norm, remedy="divide it by its norm"
            )
        object.__setattr__(self, "vector", vector)

    @property
    def size(self) -> int:
        return int(self.vector.size)

    @property
    def spike(self) -> float | None:
        """Height of the one non-zero entry of a Dirac canary, None for any other."""
        height = float(self.vector[np.argmax(np.abs(self.vector))])
        return height if np.count_nonzero(self.vector) == 1 else None


def dirac(size: int, index: int = 0) -> AxisCanary:
    """Zero but for one index (Nasr et al. 2023; the paper's canary): an orbit of `size` points."""
    vector = np.zeros(size)
    vector[index] = 1.0
    return AxisCanary(name="dirac", vector=vector)


def random_direction(size: int, rng: np.random.Generator) -> AxisCanary:
    """Uniform on the sphere: nearly every entry differs, so its orbit is the whole group."""
    vector = rng.standard_normal(size)
    return AxisCanary(name="random-direction", vector=vector / np.linalg.norm(vector))


def constant(size: int) -> AxisCanary:
    """The same value everywhere: a permutation of the axis does not move it at all."""
    return AxisCanary(name="constant-on-axis", vector=np.full(size, size**-0.5))


def given(vector: Floats, name: str = "given") -> AxisCanary:
    """A user's own direction, normalised.

    >>> given(np.array([3.0, 4.0])).vector.tolist()
    [0.6, 0.8]
    """
    values = np.asarray(vector, dtype=np.float64)
    norm = float(np.linalg.norm(values))
    if not norm > 0.0:
        raise InvalidArgumentError("vector", expected="a non-zero finite vector", got=norm)
    return AxisCanary(name=name, vector=values / norm)
