"""Undoing a permutation by linear assignment, as in Git Re-Basin's weight matching.

Rows of a released matrix are matched with rows of a known one so that the summed squared distance
is least. `scipy.optimize.linear_sum_assignment` solves it exactly; where every row's nearest
partner is a different one, that assignment is already optimal and the solver is not called.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from shuffled_dpsgd.auditing.estimators.scores import Floats

Indices = NDArray[np.intp]


def assign(cost: Floats) -> Indices:
    """The column of each row in an assignment of least total cost.

    >>> assign(np.array([[1.0, 0.0], [0.0, 3.0]])).tolist()
    [1, 0]
    """
    nearest: Indices = np.argmin(cost, axis=1)
    if np.unique(nearest).size == cost.shape[0] == cost.shape[1]:
        return nearest
    columns: Indices = linear_sum_assignment(cost)[1]
    return columns


def assignment_cost(known: Floats, released: Floats) -> Floats:
    """Squared distances of rows up to a term that depends on the known row alone."""
    norms = np.einsum("...jd,...jd->...j", released, released)
    inner = known @ np.swapaxes(released, -1, -2)
    cost: Floats = 0.5 * norms[..., None, :] - inner
    return cost


def match_rows(known: Floats, released: Floats) -> Indices:
    """For each known row the released row that holds it; leading axes of `released` are a batch."""
    cost = assignment_cost(known, released)
    return np.array([assign(one) for one in cost.reshape(-1, *cost.shape[-2:])]).reshape(
        *cost.shape[:-1]
    )
