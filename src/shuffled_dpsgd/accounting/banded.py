"""Which banded noise to take: rows for a block of steps, and how many steps a block should have.

Noise is weighed by what it does to the weights: after n steps they carry the sum of n steps' noise.
For a block of b steps and ⌈T/b⌉ blocks, `best_rows` minimises the mean square of that sum over all
steps of the run, among all lower triangular C = L⁻¹ with columns of norm one. With X = CᵀC and W
the weights of that mean it is tr(W·X⁻¹) over positive X of unit diagonal, which is convex, and best
at X = D^{−1/2}(D^{1/2}·W·D^{1/2})^{1/2}·D^{−1/2} for the diagonal D that makes X's diagonal one
(Denisov et al. 2022). The last weights alone are no objective: their noise is least where C is
singular, which is one batch of b times the size in b steps' time, and `advise` compares with that.

What is found here decides how good the noise is and never what is proven: the core measures the
sensitivity of any rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from shuffled_dpsgd.accounting.calibration import calibrate_certified
from shuffled_dpsgd.core.banded import sensitivity
from shuffled_dpsgd.core.claim import Adjacency
from shuffled_dpsgd.errors import InvalidArgumentError

SIZES = (2, 4, 8, 16, 32)
# Less than so much of the noise taken away is not worth other draws and a harder resume.
WORTH_IT = 0.99
_TURNS, _CLOSE = 5000, 1e-10

Rows = tuple[tuple[float, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Banded:
    """Banded noise at a certified ε, against independent noise at the same.

    `ratio` is the root mean square of the noise in the last weights over that of independent
    noise; `batch_ratio` is what one step of b batches together, instead of b steps, would have.
    """

    rows: Rows
    noise_multiplier: float
    ratio: float
    batch_ratio: float

    @property
    def bands(self) -> int:
        """Steps in a block."""
        return len(self.rows)


@lru_cache(maxsize=64)
def best_rows(bands: int, blocks: int) -> Rows:
    """The rows L of a block, for a run of so many blocks."""
    weights = np.full(bands, 1.0 / bands)
    weights[-1] += (blocks - 1) / 2.0
    later = np.cumsum(weights[::-1])[::-1]
    places = np.arange(bands)
    wanted = later[np.maximum(places[:, None], places[None, :])]
    diagonal = np.ones(bands)
    root = wanted
    for _ in range(_TURNS):
        half = np.sqrt(diagonal)
        values, vectors = np.linalg.eigh(half[:, None] * wanted * half[None, :])
        root = (vectors * np.sqrt(np.maximum(values, 0.0))) @ vectors.T
        last, diagonal = diagonal, np.diag(root).copy()
        if np.abs(diagonal / last - 1.0).max() < _CLOSE:
            break
    half = np.sqrt(diagonal)
    gram = root / half[:, None] / half[None, :]
    # The factor C of CᵀC that is lower triangular: Cholesky's of the reversed matrix, reversed.
    factor = np.linalg.cholesky(gram[::-1, ::-1])[::-1, ::-1].T
    rows = np.tril(np.linalg.inv(factor / np.linalg.norm(factor, axis=0)))
    return tuple(tuple(float(value) for value in row) for row in rows)


def noise_of_sum(rows: Rows, num_steps: int) -> float:
    """Root mean square of the sum of all steps' noise, in units of the noise multiplier."""
    matrix = np.array(rows)
    whole, rest = divmod(num_steps, len(rows))
    ends = np.square(matrix.sum(axis=0)).sum() * whole
    ends += np.square(matrix[:rest, :rest].sum(axis=0)).sum()
    return sensitivity(rows) * math.sqrt(float(ends))


def _fitting(size: int, num_steps: int) -> int:
    """The size within √2 of this one whose blocks reach the least beyond the end of the run."""
    near = range(math.ceil(size / math.sqrt(2.0)), int(size * math.sqrt(2.0)) + 1)
    return min(near, key=lambda each: (-num_steps % each, abs(each - size)))


def banded_noise(
    *,
    epsilon: float,
    delta: float,
    sampling_prob: float,
    num_steps: int,
    adjacency: Adjacency = "add-remove",
    bands: int | None = None,
) -> list[Banded]:
    """Banded noise with blocks of so many steps, or of sizes near `SIZES`, at a given ε."""
    alone = calibrate_certified(
        epsilon=epsilon,
        delta=delta,
        sampling_prob=sampling_prob,
        num_steps=num_steps,
        adjacency=adjacency,
    ).noise_multiplier * math.sqrt(num_steps)
    found: list[Banded] = []
    for size in [_fitting(each, num_steps) for each in SIZES] if bands is None else [bands]:
        if size > num_steps or size * sampling_prob > 1.0 or size < 2:
            break
        blocks = math.ceil(num_steps / size)
        noise = calibrate_certified(
            epsilon=epsilon,
            delta=delta,
            sampling_prob=size * sampling_prob,
            num_steps=blocks,
            adjacency=adjacency,
        ).noise_multiplier
        rows = best_rows(size, blocks)
        found.append(
            Banded(
                rows=rows,
                noise_multiplier=noise,
                ratio=noise * noise_of_sum(rows, num_steps) / alone,
                batch_ratio=noise * math.sqrt(blocks) / alone,
            )
        )
    return found


def best_banded(found: list[Banded]) -> Banded:
    """The one that leaves the least noise in the last weights.

    Raises:
        InvalidArgumentError: none leaves less than independent noise does.
    """
    best = min(found, key=lambda each: each.ratio, default=None)
    if best is None or best.ratio > WORTH_IT:
        ratios = ", ".join(f"{each.ratio:.3g} with bands={each.bands}" for each in found)
        raise InvalidArgumentError(
            "noise",
            expected="'independent', as banded noise gains nothing for this plan",
            got=f"noise in the last weights over that of independent noise: {ratios or 'none'}",
            remedy="it gains where ε is large or few of the records are drawn in few steps; larger "
            "batches gain always (`shuffled-dpsgd advise`)",
        )
    return best
