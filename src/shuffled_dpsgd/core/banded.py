"""Banded noise: within a block of b steps the noises are combinations of b independent draws.

Step p of a block adds s·σ·C·Σ_{i ≤ p} rows[p][i]·Z_i to its sum, with Z_0 … Z_{b−1} standard normal
and drawn for this block alone. `rows` is a lower triangular L with a positive diagonal, and s, its
`sensitivity`, the largest norm of a column of L⁻¹. What one step adds, later ones take away in part
(banded matrix factorisation, Choquette-Choo et al. 2023, with bands that end with their block).

Fact established here: if a record joins one step of a block at most, at place j with probability q
for each j (`sampler`), then T steps cost as much as ⌈T/b⌉ steps of noise σ at rate b·q.

Proof. Give away the place j that the record would take: what it is does not depend on whether it
joins, which has probability b·q. Give away as well what the others draw, and all that was released
before the block. From the releases y_p = x_p + s·σ·C·(LZ)_p of the block one can compute L⁻¹y/s =
L⁻¹x/s + σ·C·Z, and the other way round, step by step, since L is lower triangular. The sums x_p of
the others follow from what was released before step p. The record adds its clipped gradient g to
x_j: it follows from what was released before step j, on which its joining had no influence. So the
block shows the record, if it joins, as a shift by (column j of L⁻¹)·g/s, of norm C at most, in
independent noise of standard deviation σ·C. That is one step of the sampled Gaussian at rate b·q,
whatever j is (δ is jointly convex). Blocks have draws of their own, and a block that ends early
shows less. Groups of records are not covered: what one of them does may depend on another. ∎

The keys of a block's draws stay in memory until it ends. A block broken off is never continued.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shuffled_dpsgd.errors import require

_ROOM, _WORST_CONDITION = 1e-6, 1e6  # rounding, and where it is smaller


def sensitivity(rows: Sequence[Sequence[float]]) -> float:
    """The largest norm of a column of the inverse, never below it; refuses what has no inverse.

    >>> round(sensitivity([[1.25, 0.0], [-0.75, 1.0]]), 4)
    1.0
    """
    matrix = np.array(rows, dtype=np.float64)
    is_square = matrix.ndim == 2 and matrix.shape[0] == matrix.shape[1]
    is_lower = is_square and bool((np.triu(matrix, 1) == 0.0).all() and (np.diag(matrix) > 0).all())
    is_fine = is_lower and np.linalg.cond(matrix) < _WORST_CONDITION
    require(is_fine, "noise_rows", "a lower triangular matrix far from singular", rows)
    return float(np.linalg.norm(np.linalg.inv(matrix), axis=0).max()) * (1.0 + _ROOM)
