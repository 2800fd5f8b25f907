"""An upper bound of ε(δ) for T steps of a Poisson-sampled Gaussian, float error included.

One step. Let the unit own k records, each drawn with probability q and clipped to norm C, and
measure outputs in units of C. Given everybody else's draws, the outputs with and without the unit
are mixtures of Gaussians of the same covariance σ²I. Their worst case is one-dimensional:

    remove   P = Σ_j Bin(j; k, q) N(j, σ²)   against   Q = N(0, σ²)
    add      P = N(0, σ²)                    against   Q = Σ_j Bin(j; k, q) N(−j, σ²)
    replace  P = Σ_j Bin(j; k, q) N(j, σ²)   against   Q = Σ_j Bin(j; k, q) N(−j, σ²)

Proof. With F(a, b) = (a − e^ε b)_+, δ(ε) is E[F(Σ p_i exp(X_i − Var X_i/2), Σ r_j exp(Y_j − Var
Y_j/2))], where X_i = ⟨c_i, Z⟩/σ and Y_j = ⟨d_j, Z⟩/σ for the mixtures' means c_i, d_j and a
standard normal vector Z. F is convex with F_aa, F_bb ≥ 0 ≥ F_ab, so by Gaussian interpolation
(Kahane 1986) δ grows with every Cov(X_i, X_i') and Cov(Y_j, Y_j') and falls with Cov(X_i, Y_j).
A mean of j records has norm at most j. So the first two kinds are largest when all means of a
side are parallel and as long as allowed, and the third smallest when the sides are opposite: the
pairs above. Averaging over the others' draws keeps the bound (δ is jointly convex), and pairs that
dominate every step dominate adaptive composition (Zhu, Dong & Wang 2022, Thm. 10). ∎

A largest batch M. If the others' draw S has fewer than M records, nothing is cut and the pairs are
those above for one record. If it has at least M, then with the record drawn and kept (probability
q·M/(|S| + 1) at most q) the batch is the record and M − 1 of S. That is an even choice of M out of
S, the batch without the record, with one of them exchanged for it: the means move by 2 at most, in
opposite directions where values differ. So the pairs are those above at noise σ/2, given S. Giving
away which case it is keeps the bound, and so does a larger probability of the second, which is
the worse one. It is Pr[Bin(N, q) ≥ M] at most, as others number N at most. ∎

Steps of several runs compose in the same way, one direction at a time: a unit that is in the data
is in them for every run. The pairs of all steps must be fixed before the first.

In each pair the privacy loss l(x) = log P(dx)/Q(dx) grows with x. δ(ε) = E_P[(1 − e^{ε − l})_+]
depends only on the law of l under P, and grows if P-mass moves to larger losses. T steps add T
independent losses. Three moves give an upper bound, and none relies on a fine grid:

1. `rounded_up` puts the law of l on a lattice. Cut the line at points x_i. Within a cell, move each
   output to one end of the cell at random so that P(cell) and Q(cell) stay (connect the dots,
   Doroshenko et al. 2022): E_Q of any convex function of P/Q, hence δ, can only grow. Then move
   the losses of the ends up to the lattice. Any x_i are sound; those with l(x_i) on the lattice
   are tight.
2. `compose` weighs lattice losses s by e^{λs} (an Esscher tilt) before the Fourier transform, so
   that the composed law is centred at ε and the transform's absolute error is small against δ.
3. What floats may have lost is bounded and added by the code itself: `rounded_up` takes P too
   large and Q too small by more than their error, and `compose` adds its own.

Assumed of floats: + − × ÷ √ round correctly; exp, expm1, log, log1p, pow, atan2, sin, cos of numpy
and log_ndtr of scipy are right to `ULPS` units in the last place of their value (a test compares
log_ndtr with mpmath); the FFT is made of sums and of products with numbers of modulus one.

Legend: σ noise, q sampling_prob, T steps of a kind, h spacing, l or s a privacy loss, λ tilt.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from scipy.fft import irfft, next_fast_len, rfft
from scipy.optimize import brentq, minimize_scalar
from scipy.signal import lfilter
from scipy.special import betainc, gammaln, log_ndtr

from shuffled_dpsgd.core.events import SampledGaussian

Array: TypeAlias = npt.NDArray[np.float64]

UNIT = 2.0**-52
ULPS = 8.0
LOST_SHARE = 1e-8  # of δ: what may be charged for the tails that are cut off
LOW_TAIL = 1e-22  # smaller outputs than this probability has are not looked at
OUTSIDE = 1e-10  # tilted probability outside the window of the Fourier transform
LEAST_NOISE = 1e-6
TABLE = 4001
COARSER = 16.0
LARGEST_LATTICE = 2**21
BETA_ERROR = 1e-6  # of scipy's betainc, which is right to 1e-12 (a test compares it with mpmath)


@lru_cache(maxsize=4096)
def price(
    runs: SampledGaussian | tuple[SampledGaussian, ...],
    delta: float,
    relative_error: float,
    records: int = 1,
) -> float:
    """An ε' with δ(ε') ≤ `delta` for a unit of so many records; infinite with hardly any noise.

    Of several runs on the same data, which name the same adjacency, it covers all together.
    """
    runs = (runs,) if isinstance(runs, SampledGaussian) else runs
    if any(run.noise_multiplier < LEAST_NOISE for run in runs):
        return math.inf
    if records > 1 and any(run.largest_batch or run.steps_per_block for run in runs):
        return math.inf  # Nothing is proven for groups under a largest batch or banded noise.
    return max(upper_epsilon(steps, delta, relative_error) for steps in directions(runs, records))


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """The mixture Σ_j exp(log_weights_j)·N(means_j, noise²)."""

    log_weights: Array
    means: Array
    noise: float

    def log_ratio(self, x: Array) -> tuple[Array, Array, float]:
        """(log of the density over N(0, noise²)'s, the posterior mean, a bound of the error)."""
        terms = np.outer(self.means, x) - 0.5 * self.means[:, None] ** 2
        terms = terms / self.noise**2 + self.log_weights[:, None]
        top = terms.max(axis=0)
        shares = np.exp(terms - top)
        total = shares.sum(axis=0)
        furthest = float(np.abs(self.means).max())
        reach = furthest * (float(np.abs(x).max(initial=0.0)) + furthest) / self.noise**2
        return top + np.log(total), self.means @ shares / total, ULPS * UNIT * (self.size + reach)

    def log_tail(self, x: Array) -> tuple[Array, Array]:
        """(log Pr[X > x], a bound of its absolute error).

        Below all means it is log1p(−Pr[X ≤ x]), which keeps the digits of a small lower tail.
        The argument z of log_ndtr is off by 2 ulps, and so its value by 2z² ulps.
        """
        z = (x - self.means[:, None]) / self.noise
        error = ULPS * UNIT * (self.size + (z**2).max(axis=0))
        low, weights = x < self.means.min(), self.log_weights[:, None]
        below = np.exp(np.logaddexp.reduce(weights + log_ndtr(z[:, low]), axis=0))
        tail = np.empty_like(x)
        tail[low] = np.log1p(-below)
        tail[~low] = np.logaddexp.reduce(weights + log_ndtr(-z[:, ~low]), axis=0)
        error[low] *= 2.0 * below
        return tail, error

    @property
    def size(self) -> float:
        """How many terms a sum has, and how large they get: for bounds of rounding errors."""
        return self.means.size + float(np.abs(self.log_weights).max())

    def quantile_above(self, probability: float) -> float:
        """An x with Pr[X > x] about `probability`."""
        reach = self.noise * (2.0 + math.sqrt(-2.0 * math.log(probability)))
        low, high = float(self.means.min()) - reach, float(self.means.max()) + reach

        def excess(x: float) -> float:
            return float(self.log_tail(np.array([x]))[0][0]) - math.log(probability)

        return float(brentq(excess, low, high, rtol=1e-6))

    def mirrored(self) -> Mixture:
        """The law of −X."""
        return Mixture(log_weights=self.log_weights, means=-self.means, noise=self.noise)


@dataclass(frozen=True, kw_only=True)
class StepPair:
    """One step's worst case in one direction: outputs of `upper` against outputs of `lower`."""

    upper: Mixture
    lower: Mixture

    def loss(self, x: Array) -> tuple[Array, Array, float]:
        """(l(x), its slope, a bound of the error of l)."""
        above, mean_above, error_above = self.upper.log_ratio(x)
        below, mean_below, error_below = self.lower.log_ratio(x)
        slope = (mean_above - mean_below) / self.upper.noise**2
        return above - below, slope, 2.0 * (error_above + error_below)


@dataclass(frozen=True, kw_only=True)
class Steps:
    """So many steps with one worst case, in one direction; by a known `chance`, `other` is it."""

    pair: StepPair
    count: int
    other: StepPair | None = None
    chance: float = 0.0

    @property
    def cases(self) -> list[tuple[float, StepPair]]:
        """Each worst case with its probability."""
        if self.other is None:
            return [(1.0, self.pair)]
        return [(1.0 - self.chance, self.pair), (self.chance, self.other)]


def directions(runs: Sequence[SampledGaussian], records: int = 1) -> list[list[Steps]]:
    """The steps of all runs together, in every direction; steps that are alike are counted once."""
    alike: Counter[SampledGaussian] = Counter()
    for run in runs:
        alike[replace(run, num_steps=1)] += run.num_steps
    kinds = [steps_of(replace(run, num_steps=count), records) for run, count in alike.items()]
    sides = max(map(len, kinds))
    return [[steps[side % len(steps)] for steps in kinds] for side in range(sides)]


def steps_of(run: SampledGaussian, records: int = 1) -> list[Steps]:
    """The steps of one run, in every direction."""
    pairs, count = pairs_of(run, records)
    if run.largest_batch is None:
        return [Steps(pair=pair, count=count) for pair in pairs]
    most, size, q = run.largest_batch, run.dataset_size or 0, run.sampling_prob
    chance = min(float(betainc(most, size - most + 1.0, q)) * (1.0 + BETA_ERROR), 1.0)
    others, _ = pairs_of(replace(run, noise_multiplier=run.noise_multiplier / 2.0))
    both = zip(pairs, others, strict=True)
    return [Steps(pair=pair, count=count, other=other, chance=chance) for pair, other in both]


def pairs_of(mechanism: SampledGaussian, records: int = 1) -> tuple[tuple[StepPair, ...], int]:
    """The worst cases of one step in every direction, and how many steps to compose.

    Without sampling the mean of T releases tells all that they tell: one release of noise σ/√T,
    and the same law of losses in both directions.
    """
    noise, q, steps = mechanism.noise_multiplier, mechanism.sampling_prob, mechanism.num_steps
    if q == 1.0:
        noise, steps = noise / math.sqrt(steps) * (1.0 - 2.0 * UNIT), 1
        joined, weights = np.array([float(records)]), np.zeros(1)
    else:
        joined = np.arange(records + 1.0)
        choose = gammaln(records + 1.0) - gammaln(joined + 1.0) - gammaln(records - joined + 1.0)
        weights = choose + joined * math.log(q) + (records - joined) * math.log1p(-q)
    drawn = Mixture(log_weights=weights, means=joined, noise=noise)
    absent = Mixture(log_weights=np.zeros(1), means=np.zeros(1), noise=noise)
    if mechanism.adjacency == "replace-one":
        return (StepPair(upper=drawn, lower=drawn.mirrored()),), steps
    remove = StepPair(upper=drawn, lower=absent)
    add = StepPair(upper=absent, lower=drawn.mirrored())
    return ((remove, add) if q < 1.0 else (remove,)), steps


@dataclass(frozen=True, kw_only=True)
class Frame:
    """Where to look, estimated by quadrature. It decides accuracy and never soundness.

    The outputs of each case of each kind of step `ranges` from here to there. `tilt`; the tilted
    composed loss's `centre`, `deviation` and window from `bottom` to `top`, with the exponents of
    Markov's inequality at its two ends.
    """

    ranges: list[tuple[float, float]]
    tilt: float
    centre: float
    deviation: float
    bottom: float
    bottom_exponent: float
    top: float
    top_exponent: float


def frame_for(steps: list[Steps], *, delta: float, epsilon: float | None = None) -> Frame:
    """The frame for the ε of `delta`, or for the δ (about `delta` or more) of a given ε.

    With K(λ) the sum of log E_P[e^{λl}] over all steps, Markov's inequality gives δ(ε) ≤
    exp(K(λ) − λε). The best λ for δ minimises (K(λ) + log 1/δ)/λ, and for ε it minimises K(λ) −
    λε. Either way the composed loss tilted by λ has that ε for its mean. The same inequality ends
    the window. One row of each array is for one case of a kind of step.
    """
    cases, counts = [each.cases for each in steps], np.array([each.count for each in steps])
    starts = np.cumsum([0, *map(len, cases[:-1])])
    kind = np.repeat(np.arange(len(cases)), list(map(len, cases)))
    pairs = [pair for kinds in cases for _, pair in kinds]
    lost = LOST_SHARE / float(counts.sum())
    lows = [-pair.upper.mirrored().quantile_above(LOW_TAIL) for pair in pairs]
    x = np.linspace(lows, [pair.upper.quantile_above(lost * delta) for pair in pairs], TABLE).T
    losses = np.stack([pair.loss(row)[0] for pair, row in zip(pairs, x, strict=True)])
    density = np.stack([pair.upper.log_ratio(row)[0] for pair, row in zip(pairs, x, strict=True)])
    density -= 0.5 * (x / np.array([[pair.upper.noise] for pair in pairs])) ** 2
    density -= np.logaddexp.reduce(density, axis=1, keepdims=True)
    density += np.log([max(chance, LOW_TAIL) for kinds in cases for chance, _ in kinds])[:, None]

    def cumulants(tilt: float) -> Array:
        by_case = np.logaddexp.reduce(density + tilt * losses, axis=1)
        return np.asarray(np.logaddexp.reduceat(by_case, starts))

    def cumulant(tilt: float) -> float:
        return float(counts @ cumulants(tilt))

    def bound(tilt: float) -> float:
        if epsilon is None:
            return (cumulant(tilt) - math.log(delta)) / tilt
        return cumulant(tilt) - tilt * epsilon

    def mean_and_deviation(tilt: float) -> tuple[float, float]:
        shares = np.exp(density + tilt * losses - cumulants(tilt)[kind, None])
        means = np.add.reduceat((shares * losses).sum(axis=1), starts)
        squares = (shares * (losses - means[kind, None]) ** 2).sum(axis=1)
        variance = float(counts @ np.add.reduceat(squares, starts))
        return float(counts @ means), max(math.sqrt(variance), 1e-12)

    untilted = mean_and_deviation(0.0)[1]
    tilt = _best(bound, 1e-3 / untilted, 1e3 / untilted)
    at = cumulant(tilt)
    centre, deviation = mean_and_deviation(tilt)

    def reach(exponent: float) -> float:
        return (cumulant(tilt + exponent) - at - math.log(OUTSIDE)) / abs(exponent)

    above = _best(reach, 1e-2 / deviation, 1e2 / deviation)
    below = _best(lambda t: reach(-t), 1e-2 / deviation, 1e2 / deviation)
    # Smaller outputs than the first have a tilted probability of at most LOST_SHARE in all steps.
    smaller = np.logaddexp.accumulate(density, axis=1) + tilt * losses
    smaller -= cumulants(tilt)[kind, None]
    first = np.maximum((smaller < math.log(lost)).sum(axis=1) - 1, 0)
    return Frame(
        ranges=[(float(row[i]), float(row[-1])) for row, i in zip(x, first, strict=True)],
        tilt=tilt,
        centre=centre,
        deviation=deviation,
        bottom=min(-reach(-below), centre - deviation),
        bottom_exponent=below,
        top=max(reach(above), centre + deviation),
        top_exponent=above,
    )


def _best(objective: Callable[[float], float], low: float, high: float) -> float:
    """The positive number in a range that minimises a function with one minimum."""
    bounds = (math.log(low), math.log(high))
    return math.exp(float(minimize_scalar(lambda t: objective(math.exp(t)), bounds=bounds).x))


def spacing_for(steps: list[Steps], frame: Frame, allowed: float) -> float:
    """A spacing whose rounding raises log δ by about `allowed`, as far as memory allows.

    Rounding spreads a step's P/Q by a relative variance of h²/6 on average, which raises K(λ) by
    λ(λ+1)h²/12 for each of T steps. A power of two, so that lattice losses are exact floats.
    """
    curvature = max(frame.tilt * (frame.tilt + 1.0), frame.deviation**-2)
    widest = frame.top - frame.bottom
    pairs = [pair for each in steps for _, pair in each.cases]
    for pair, ends in zip(pairs, frame.ranges, strict=True):
        losses = pair.loss(np.array(ends))[0]
        widest = max(widest, float(losses[1] - losses[0]))
    total = sum(each.count for each in steps)
    wanted = max(math.sqrt(12.0 * allowed / (total * curvature)), widest / LARGEST_LATTICE)
    return 2.0 ** math.floor(math.log2(wanted))


def cut(
    pair: StepPair, ends: tuple[float, float], spacing: float, *, side: float
) -> tuple[Array, Array, float]:
    """Outputs x whose losses are a hair to one `side` of all lattice points: (x, l(x), error)."""
    table = np.linspace(*ends, TABLE)
    losses, _, error = pair.loss(table)
    first, last = math.ceil(losses[0] / spacing), math.floor(losses[-1] / spacing)
    wanted = spacing * np.arange(first, last + 1) + side * 4.0 * error
    x = np.interp(wanted, losses, table)
    cell = np.clip(np.searchsorted(losses, wanted), 1, TABLE - 1)
    for _ in range(4):  # Newton's steps, kept inside the table's cell
        value, slope, _ = pair.loss(x)
        with np.errstate(divide="ignore", invalid="ignore"):
            step = np.nan_to_num((value - wanted) / slope)
        x = np.clip(x - step, table[cell - 1], table[cell])
    x = np.maximum.accumulate(np.concatenate([table[:1], x, table[-1:]]))
    losses, _, error = pair.loss(x)
    return x, np.maximum.accumulate(losses), error


@dataclass(frozen=True, kw_only=True)
class Lattice:
    """P-mass `masses[i]` at loss (first + i)·spacing + offset, `lost` at +∞, in `count` steps."""

    spacing: float
    first: int
    masses: Array
    count: int
    lost: float = 0.0
    offset: float = 0.0


def rounded_up(steps: Steps, ranges: Iterator[tuple[float, float]], spacing: float) -> Lattice:
    """A lattice law whose δ(ε) is at least that of all the step's cases together.

    Takes the next of the `ranges` for each case.
    """
    parts = [(chance, *_rounded(pair, next(ranges), spacing)) for chance, pair in steps.cases]
    first = min(start for _, start, _, _ in parts)
    masses = np.zeros(max(start + own.size for _, start, own, _ in parts) - first)
    lost, wider = 0.0, 1.0 + 8.0 * ULPS * UNIT
    for chance, start, own, left_out in parts:
        masses[start - first :][: own.size] += chance * own * wider
        lost += chance * left_out * wider
    return Lattice(spacing=spacing, first=first, masses=masses, count=steps.count, lost=lost)


def _rounded(pair: StepPair, ends: tuple[float, float], spacing: float) -> tuple[int, Array, float]:
    """(first place, masses, lost mass) of a law whose δ(ε) is at least the pair's, for every ε.

    Let S_P and S_Q be the tails at the cuts x_i, l_i the losses there, and p_i, q_i the masses of
    the cells. The two ends of a cell get P-masses `down` at l_i and `up` at l_{i+1}, with
    down + up = p_i and down·e^{−l_i} + up·e^{−l_{i+1}} = q_i. Summed over all cells above x_i the
    law has δ(l_i) = S_P(x_i) − e^{l_i}·S_Q(x_i). That is the pair's own δ there, whose graph over
    e^ε is convex and so lies below the law's chords in between. The first and the last cell may be
    spread to lattice points beyond their losses. Outputs below the first cut go to the second, and
    those above the last to infinity.

    Floats: S_P is taken too large and S_Q too small by more than their errors, which raises
    δ(l_i). `up` is raised by more than the error of its formula (of p_i, q_i and the cell's
    width), at the expense of `down`, and a mass that comes out negative is dropped: both raise δ.
    A last factor, of the caller, covers the sums.
    """
    x, losses, error = cut(pair, ends, spacing, side=-1.0)
    index = np.ceil((losses + 2.0 * error) / spacing)
    index[0] = math.floor((losses[0] - 2.0 * error) / spacing)
    losses[[0, -1]] = spacing * index[[0, -1]]
    apart = np.concatenate([[True], np.diff(losses) > 0.25 * spacing])
    x, losses, index = x[apart], losses[apart], index[apart]
    above, above_error = pair.upper.log_tail(x)
    below, below_error = pair.lower.log_tail(x)
    above, below = above + above_error, below - below_error
    p = np.exp(above[:-1]) * -np.expm1(np.diff(above))
    q = np.exp(losses[:-1] + below[:-1]) * -np.expm1(np.diff(below))  # times e^{l_i}
    width = -np.expm1(-np.diff(losses))
    slack = 4.0 * error + UNIT * (4.0 * ULPS + np.abs(losses[:-1]) + np.abs(below[:-1]))
    up = (p - q + slack * (np.abs(p) + np.abs(q) + np.abs(p - q) / width)) / width
    place = (index - index[0]).astype(np.int64)
    masses = np.zeros(int(place[-1]) + 1)
    np.add.at(masses, place[:-1], np.maximum(p - up, 0.0))
    np.add.at(masses, place[1:], np.maximum(up, 0.0))
    masses[place[1]] += max(-math.expm1(above[0]), 0.0)
    return int(index[0]), masses, math.exp(above[-1])


@dataclass(frozen=True, kw_only=True)
class DeltaCurve:
    """Bounds of δ at losses `epsilons`; `noise` is what the transform's error added to `upper`."""

    epsilons: Array
    lower: Array
    upper: Array
    noise: Array


def compose(lattices: list[Lattice], frame: Frame, real: type = np.float64) -> DeltaCurve:
    """δ(ε) of the sum of all steps' losses, for ε over the frame's window.

    The lattices share one spacing. With K = log Σ_s p(s)e^{λs} and the tilted law t(s) =
    p(s)e^{λs − K} of each, and S the sum of all steps' K, sums of losses satisfy p*(s) = e^{S −
    λs}·t*(s). `_power` computes t* in the type `real`.

    - Wrapping. Indices are taken modulo N, so the window also receives the mass of t* outside it:
      by Markov's inequality at most `above` + `below`, with any exponents. A sum s counts for δ(ε)
      with e^{S − λs}(1 − e^{ε−s}) ≤ e^{S − λε}/(λ+1), so the lower bound loses (above +
      below) times that. The upper bound may keep it, and gains what is missing above the window,
      at most above·e^{S − λ·top}.
    - δ(ε_j) = (1 − e^{−h})·Σ_{i>j} y_i with y_i = p*(s_i) + e^{−h}·y_{i+1} (`_delta`): sums of at
      most N positive terms. Exponents are off by their size in ulps, in each of t*'s factors.
    """
    h, tilt = lattices[0].spacing, frame.tilt
    places = [each.first + np.arange(each.masses.size) for each in lattices]
    with np.errstate(divide="ignore"):
        logs = [np.log(each.masses) for each in lattices]

    def cumulant(t: float) -> float:
        return float(sum(each.count * k for each, k in zip(lattices, cumulants(t), strict=True)))

    def cumulants(t: float) -> list[float]:
        both = zip(logs, places, strict=True)
        return [float(np.logaddexp.reduce(log + t * (h * place))) for log, place in both]

    at, shift = cumulant(tilt), sum(each.count * each.offset for each in lattices)
    bottom = math.floor((frame.bottom - shift) / h)
    size = next_fast_len(math.ceil((frame.top - shift) / h) - bottom + 1, real=True)
    top, t, u = bottom + size, frame.top_exponent, frame.bottom_exponent
    laws: list[tuple[npt.NDArray[Any], int]] = []
    doubt, sizes = 0.0, size + tilt * h * float(max(abs(bottom), abs(top)))
    for each, log, place, own in zip(lattices, logs, places, cumulants(tilt), strict=True):
        tilted = np.exp(log + tilt * (h * place) - own)
        wrapped = np.bincount(np.mod(place, size), weights=tilted, minlength=size)
        laws.append((wrapped.astype(real), each.count))
        reach = (tilt + t + u) * h * float(np.abs(place).max()) + abs(own)
        doubt += ULPS * UNIT * each.count * (place.size + reach)
        exponents = np.abs(log) + np.abs(tilt * (h * place)) + 2.0 * abs(own)
        sizes += each.count * (4.0 + float(exponents[tilted > 0.0].max())) + place.size
    above = math.exp(min(cumulant(tilt + t) - at - t * h * top + doubt, 0.0))
    below = math.exp(min(cumulant(tilt - u) - at + u * h * bottom + doubt, 0.0))
    composed, error = _power(laws)
    composed = np.roll(composed, -(bottom % size))
    epsilons = h * np.arange(bottom, top, dtype=np.float64)
    roundoff = math.expm1(min(ULPS * UNIT * sizes, 700.0))
    # An overflow far below ε becomes an infinite bound, or none (nan).
    with np.errstate(over="ignore", invalid="ignore"):
        weights = np.exp(at - tilt * epsilons)
        noise = _delta(weights, h) * error
        upper = _delta(weights * composed, h) + noise
        upper += above * np.exp(at - tilt * h * top)
        upper = upper * (1.0 + roundoff) + sum(each.count * each.lost for each in lattices)
        lower = _delta(weights * np.maximum(composed - error, 0.0), h)
        lower = (lower - (above + below) * weights / (tilt + 1.0)) * max(1.0 - roundoff, 0.0)
    return DeltaCurve(epsilons=epsilons + shift, lower=lower, upper=upper, noise=noise)


def _power(laws: list[tuple[npt.NDArray[Any], int]]) -> tuple[Array, float]:
    """(the convolution modulo N of laws, each so often; a bound of its error at every place).

    Each value f of a transform sums all inputs, each after log2 N additions and products with
    numbers of modulus one, so it errs by at most e = ULPS·unit·log2 N·Σt. With m = |f| + e the
    product of all f^T errs by Π m^T·Σ T·(e/m + 5·ULPS·unit), as moduli, angles (at most π) and
    powers err by ULPS, and sums of angles by less. The result errs by the mean of that over
    frequencies, and by the mean of the products times ULPS·unit·log2 N for the transform back.
    Masses and powers below 1e-300 may have become zero.
    """
    size, unit = laws[0][0].size, float(np.finfo(laws[0][0].dtype).eps)
    rounding = ULPS * unit * math.log2(size)
    modulus, angle = np.ones(1, laws[0][0].dtype), np.zeros(1, laws[0][0].dtype)
    larger, share, steps = np.ones(size // 2 + 1), np.zeros(size // 2 + 1), 0
    for law, count in laws:
        values = rfft(law)
        error = rounding * float(law.sum())
        most = (np.abs(values) + error).astype(np.float64)
        modulus = modulus * np.abs(values) ** count
        angle = angle + count * np.angle(values)
        larger = larger * most**count
        share += count * (error / most + (5.0 * ULPS + 2.0 * len(laws)) * unit)
        steps += count
    off = larger * (share + rounding) + steps * size * 1e-300
    composed: Array = np.maximum(irfft(modulus * np.exp(1j * angle), size).astype(np.float64), 0.0)
    return composed, 2.0 * float(off.sum()) / size


def _delta(masses: Array, spacing: float) -> Array:
    """Σ_{i>j} p_i(1 − e^{s_j − s_i}) at every lattice loss s_j."""
    later = np.concatenate([[0.0], masses[:0:-1]])
    y = lfilter([1.0], [1.0, -math.exp(-spacing)], later)
    sums: Array = -math.expm1(-spacing) * np.cumsum(y)[::-1]
    return sums


def upper_epsilon(steps: list[Steps], delta: float, relative_error: float) -> float:
    """An ε' with δ(ε') ≤ `delta`, about `relative_error` above the smallest.

    A coarse lattice says where to look. Both ε' are proven, so the smaller one is.
    """
    frame = frame_for(steps, delta=delta)
    coarse = _priced(steps, frame, delta, COARSER * relative_error * frame.centre)
    if coarse == 0.0:
        return 0.0
    frame = frame_for(steps, delta=delta, epsilon=coarse)
    return min(coarse, _priced(steps, frame, delta, relative_error * coarse))


def lattices_for(steps: list[Steps], frame: Frame, allowed: float) -> list[Lattice]:
    """Every kind of step on one lattice, whose rounding raises log δ by about `allowed`."""
    spacing = spacing_for(steps, frame, allowed)
    ranges = iter(frame.ranges)
    return [rounded_up(each, ranges, spacing) for each in steps]


def _priced(steps: list[Steps], frame: Frame, delta: float, error: float) -> float:
    """An ε' with δ(ε') ≤ `delta`, from one lattice whose rounding costs about `error` of ε.

    Where the transform's own error costs more than that, long doubles may cost less.
    """
    lattices = lattices_for(steps, frame, error * frame.tilt)
    largest = sum(at.count * at.spacing * (at.first + at.masses.size - 1) for at in lattices)
    # No sum of finite losses exceeds the largest losses of all steps together.
    finite = sum(each.count * each.lost for each in lattices) <= delta
    epsilon = max(largest * (1.0 + ULPS * UNIT), 0.0) if finite else math.inf
    for real in (np.float64, np.longdouble):
        curve = compose(lattices, frame, real)
        epsilon = min(epsilon, _where_it_falls(curve, delta))
        at = min(int(np.searchsorted(curve.epsilons, epsilon)), curve.noise.size - 1)
        if curve.noise[at] <= frame.tilt * error * delta:
            break
    return epsilon


def _where_it_falls(curve: DeltaCurve, delta: float) -> float:
    """The ε ≥ 0 at which the upper bound falls to `delta`; infinite if not within the window.

    Over e^ε the bound is convex between nodes, so the chord is a bound as well.
    """
    enough = np.flatnonzero(curve.upper <= delta)
    if enough.size == 0:
        return math.inf
    node = int(enough[0])
    if node == 0:
        return max(float(curve.epsilons[0]), 0.0)
    left, right = map(float, curve.epsilons[node - 1 : node + 1])
    more, less = curve.upper[node - 1 : node + 1]
    if not more < math.inf or right - left > 1.0:
        return max(float(right), 0.0)
    share = (more - delta) / (more - less)
    between = float(left + math.log1p(share * math.expm1(right - left)))
    return min(max(between + ULPS * UNIT * (abs(between) + right - left), 0.0), max(right, 0.0))
