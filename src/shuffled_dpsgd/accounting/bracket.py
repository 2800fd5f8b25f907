"""How little the certified ε can be improved: a proven lower bound, and where it is attained.

Nobody is promised the lower end. Audits need it: a lower bound on a mechanism's noise becomes a
lower bound on ε. Where `is_exact` holds, the certified ε is attained by a gradient that no
permutation moves, so no accountant that knows clip, sampling rate, noise and steps alone can
certify less. docs/attained.md states and proves that, and the theorem that the shuffle gains
nothing for losses of such gradients.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from shuffled_dpsgd.accounting.certified import certified_claim
from shuffled_dpsgd.core.claim import Adjacency, Kind
from shuffled_dpsgd.core.events import SampledGaussian
from shuffled_dpsgd.core.pld import (
    ULPS,
    UNIT,
    Lattice,
    Steps,
    compose,
    cut,
    directions,
    frame_for,
    spacing_for,
)

LOWER_ERROR = 1e-6
NOISE_SHARE = 1e-3
STATEMENT = (
    "exact, not merely an upper bound: in exact arithmetic a gradient that no permutation moves "
    "attains it, so no accountant that knows only clip, sampling rate, noise and steps can certify "
    "less"
)
CONDITIONS = (
    "Poisson sampling, without a largest batch",
    "flat clipping to c over all trainable parameters, by a clip that follows no norms",
    "a batch clip c' of at least c, or none, on the block with the smallest noise",
    "one record added or removed",
    "every step's noisy sums released, or every step's weights, of float32 or wider, under SGD "
    "(momentum or not)",
)


@dataclass(frozen=True, kw_only=True)
class Bracket:
    """A proven interval that contains the exact ε of the mechanism."""

    lower: float
    upper: float
    kind: Kind = "proven"


def certified_bracket(
    *,
    noise_multiplier: float,
    sampling_prob: float,
    num_steps: int,
    delta: float,
    adjacency: Adjacency = "add-remove",
) -> Bracket:
    """The exact ε lies between these two; the upper end is `certified_claim`'s."""
    mechanism = SampledGaussian(
        noise_multiplier=noise_multiplier,
        sampling_prob=sampling_prob,
        num_steps=num_steps,
        adjacency=adjacency,
    )
    upper = certified_claim(**mechanism.to_json(), delta=delta).epsilon
    if math.isinf(upper):
        return Bracket(lower=math.inf, upper=math.inf)
    lower = max(lower_epsilon(steps, delta) for (steps,) in directions([mechanism]))
    return Bracket(lower=min(lower, upper), upper=upper)


def lower_epsilon(steps: Steps, delta: float) -> float:
    """An ε' with δ(ε') ≥ `delta`, or 0.

    Mostly within 1e-3 of the largest. It is looser where very many steps at a tiny sampling rate
    put most of a step's mass into a few cells: rounding down then costs up to a spacing a step.
    """
    frame = frame_for([steps], delta=delta)
    allowed = LOWER_ERROR * frame.tilt * max(frame.centre, 1e-7)
    lattice = rounded_down(steps, frame.ranges[0], spacing_for([steps], frame, allowed))
    if not lattice.masses.any():
        return 0.0
    best = 0.0
    for real in (np.float64, np.longdouble):
        curve = compose([lattice], frame, real)
        reached = np.flatnonzero(curve.lower >= delta)
        if reached.size:
            best = max(best, float(curve.epsilons[reached[-1]]))
            if curve.noise[reached[-1]] <= NOISE_SHARE * delta:
                break
    return best


def rounded_down(steps: Steps, outputs: tuple[float, float], spacing: float) -> Lattice:
    """A lattice law whose δ(ε) is at most the pair's, for every ε.

    Whoever learns only in which cell the output lies knows less: the cell's loss is log(p_i/q_i).
    It is moved down to a lattice with an offset. p_i is taken too small and q_i too large by more
    than their error, and the tails are dropped: without a P-mass δ is smaller.
    """
    pair = steps.pair
    x, ends, _ = cut(pair, outputs, spacing, side=1.0)
    above, above_error = pair.upper.log_tail(x)
    below, below_error = pair.lower.log_tail(x)
    most, least = above + above_error, above - above_error
    p = np.exp(least[:-1]) * -np.expm1(most[1:] - least[:-1]) * (1.0 - 4.0 * ULPS * UNIT)
    kept = p > 0.0
    p, most, least = p[kept], (below + below_error)[:-1][kept], (below - below_error)[1:][kept]
    log_q = most + np.log(-np.expm1(least - most))
    losses = np.log(p) - log_q
    losses -= ULPS * UNIT * (4.0 + np.abs(losses) + 2.0 * np.abs(log_q))
    # What rounding has pushed far below all losses may be dropped as well.
    inside = losses >= ends[0] - spacing
    p, losses = p[inside], losses[inside]
    if p.size == 0:
        return Lattice(spacing=spacing, first=0, masses=np.zeros(1), count=steps.count)
    # An offset c lowers the mean by Σ p·((l − c) mod h), which is least at one of the remainders.
    remainder = np.mod(losses, spacing)
    order = np.argsort(remainder)
    smaller = np.cumsum(p[order]) - p[order]
    offset = float(remainder[order][np.argmin(spacing * smaller - remainder[order] * p.sum())])
    index = np.floor((losses - offset) / spacing).astype(np.int64)
    masses = np.zeros(int(index.max() - index.min()) + 1)
    np.add.at(masses, index - index.min(), p * (1.0 - ULPS * UNIT * p.size))
    first, count = int(index.min()), steps.count
    return Lattice(spacing=spacing, first=first, masses=masses, count=count, offset=offset)


def is_exact(
    *, clip: str, clip_norm: float, batch_clip_norm: float | None, adjacency: str, shows_sums: bool
) -> bool:
    """Whether the proposition covers a run; `batch_clip_norm` is that of its least noisy block.

    `shows_sums`: what is released tells the noisy sum of every step. Elsewhere the certified ε
    holds, attained or not.
    """
    unhurt = batch_clip_norm is None or batch_clip_norm >= clip_norm
    return clip == "flat" and unhurt and adjacency == "add-remove" and shows_sums
