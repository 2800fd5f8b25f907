"""ε(δ) of DP-SGD a second time: moments of the true densities, inverted along a line in the plane.

Shares no code and no method with `shuffled_dpsgd.core.pld`: no lattice, no Fourier transform of a
distribution, no dp_accounting. With M(z) = E_P[e^{z·l}] the moments of one step's privacy loss,

    δ(ε) = (1/π) ∫_0^∞ Re[ M(c + it)^T · e^{−(c + it)ε} / ((c + it)(c + 1 + it)) ] dt,

for any c > 0, as (1 − e^{−y})_+ is the inverse Laplace transform of 1/(z(z + 1)). M is integrated
over outputs x by Gauss and Legendre's rule in panels, and the line by the trapezoid rule. c is
where the integrand is smallest on the real axis, so little cancels. Outputs so large that all T
steps together reach them with probability 1e-9·δ are left out; without that, the moments are those
of events nobody will see. A single step needs no line: δ(ε) = P(x > x*) − e^ε·Q(x > x*).

    python tests/core/independent.py        # writes independent.json beside this file
"""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.optimize import brentq, minimize_scalar
from scipy.special import log_ndtr, ndtri_exp
from scipy.stats import binom

TABLE = Path(__file__).with_name("independent.json")
DIRECTIONS = {"add-remove": ("remove", "add"), "replace-one": ("replace",)}
PANEL, PANEL_WEIGHTS = np.polynomial.legendre.leggauss(16)
Setting = tuple[float, float, int, float, str]  # q, σ, T, δ, adjacency


@dataclass(frozen=True)
class Steps:
    """T steps at rate q and noise σ in one direction; δ says how rare is too rare to matter.

    A unit of so many `records` joins with a binomial number of them.
    """

    q: float
    sigma: float
    count: int
    delta: float
    direction: str
    records: int = 1

    def mixed(self, y: np.ndarray) -> np.ndarray:
        """log of Σ_j Bin(j; k, q)·N(j, σ²) over N(0, σ²)."""
        gains = [
            log_weight + (joined * y - 0.5 * joined**2) / self.sigma**2
            for joined, log_weight in enumerate(
                binom.logpmf(range(self.records + 1), self.records, self.q)
            )
        ]
        return np.logaddexp.reduce(gains)

    def step(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(log density of the output, privacy loss) of one step, at outputs x."""
        normal = -0.5 * (x / self.sigma) ** 2 - math.log(self.sigma * math.sqrt(2.0 * math.pi))
        if self.direction == "remove":
            return normal + self.mixed(x), self.mixed(x)
        if self.direction == "add":
            return normal, -self.mixed(x)
        return normal + self.mixed(x), self.mixed(x) - self.mixed(-x)

    def nodes(self, c: float, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(losses, log of weights times density, x) where density·e^{c·l} is not negligible."""
        far = self.records - self.sigma * float(ndtri_exp(math.log(1e-9 * self.delta / self.count)))
        x = np.linspace(-45.0 * self.sigma - 2.0, far, 20_001)
        density, loss = self.step(x)
        size = density + c * loss
        kept = np.flatnonzero(size > size.max() - 45.0)
        low, high = x[max(kept[0] - 1, 0)], x[min(kept[-1] + 1, x.size - 1)]
        edges = np.linspace(low, high, count // 16 + 1)
        half = 0.5 * (edges[1] - edges[0])
        x = (edges[:-1, None] + half * (1.0 + PANEL)).ravel()
        density, loss = self.step(x)
        return loss, density + np.log(np.tile(half * PANEL_WEIGHTS, edges.size - 1)), x

    def log_moment(self, c: float) -> float:
        loss, log_mass, _ = self.nodes(c, 4000)
        return float(np.logaddexp.reduce(log_mass + c * loss))

    def markov(self) -> float:
        """An upper bound of ε, where the search for it begins."""

        def bound(log_c: float) -> float:
            moment = self.log_moment(math.exp(log_c))
            return (self.count * moment - math.log(self.delta)) * math.exp(-log_c)

        return float(minimize_scalar(bound, bounds=(-7.0, 16.0)).fun)


def log_one_step_delta(steps: Steps, epsilon: float) -> float:
    """log δ(ε) of a single step, from the two tails at the output whose loss is ε."""

    def excess(x: float) -> float:
        return float(steps.step(np.array([x]))[1][0]) - epsilon

    far = 60.0 * steps.sigma + 60.0 * steps.sigma**2 * (1.0 + abs(epsilon)) + 2.0
    if excess(-far) * excess(far) > 0.0:
        return -math.inf if excess(far) < 0.0 else 0.0
    x = float(brentq(excess, -far, far, xtol=1e-14 * far, rtol=1e-15))

    def log_tail(sign: float, means: tuple[float, ...]) -> float:
        """log of (1 − q)·Pr[N(0, σ²) beyond x] + q·Pr[N(mean, σ²) beyond x]."""
        beyond = [float(log_ndtr(sign * (mean - x) / steps.sigma)) for mean in means]
        if len(means) == 1 or steps.q == 1.0:
            return beyond[-1]
        return float(np.logaddexp(math.log1p(-steps.q) + beyond[0], math.log(steps.q) + beyond[1]))

    absent, joined, other = (0.0,), (0.0, 1.0), (0.0, -1.0)
    sign, upper, lower = {
        "remove": (1.0, joined, absent),
        "add": (-1.0, absent, joined),
        "replace": (1.0, joined, other),
    }[steps.direction]
    first, second = log_tail(sign, upper), epsilon + log_tail(sign, lower)
    return first + math.log(-math.expm1(second - first)) if second < first else -math.inf


class Line:
    """The moments along one vertical line: δ(ε) for the ε near those for which c is right.

    Several kinds of steps compose by the product of their moments.
    """

    def __init__(self, kinds: Sequence[Steps], epsilon: float, aside: float = 1.0) -> None:
        def size(log_c: float) -> float:
            moment = sum(steps.count * steps.log_moment(math.exp(log_c)) for steps in kinds)
            return moment - math.exp(log_c) * epsilon - log_c - math.log1p(math.exp(log_c))

        best = minimize_scalar(size, bounds=(-7.0, 16.0), options={"xatol": 1e-4})
        self.c = aside * math.exp(float(best.x))
        self.kinds = [(steps, steps.log_moment(self.c)) for steps in kinds]
        self.at = sum(steps.count * moment for steps, moment in self.kinds)
        variance, width = 0.0, 0.0
        for steps, moment in self.kinds:
            loss, log_mass, _ = steps.nodes(self.c, 4000)
            weights = np.exp(log_mass + self.c * loss - moment)
            variance += steps.count * float(weights @ (loss - weights @ loss) ** 2)
            width = max(width, float(loss.max() - loss.min()))
        self.spacing = 2.0 * math.pi / (60.0 * aside * math.sqrt(variance) + 8.0 / self.c)
        self.left = self._follow(width)

    def _follow(self, width: float) -> float:
        """M(c + it)^T/M(c)^T for t = 0, dt, 2dt, … until negligible; what was left in the end."""
        found: list[np.ndarray] = []
        block, start, left = 400, 0, 1.0
        while start < 200_000 and left > 1e-12:
            t = self.spacing * np.arange(start, start + block)
            values = np.ones(block, dtype=complex)
            for steps, moment in self.kinds:
                # Several points for each oscillation of e^{it·loss}.
                loss, log_mass, _ = steps.nodes(self.c, int(max(4000, 1.5 * t[-1] * width)))
                weights = np.exp(log_mass + self.c * loss - moment)
                parts = np.array_split(t, max(1, t.size * loss.size // 4_000_000))
                each = np.concatenate([np.exp(1j * np.outer(p, loss)) @ weights for p in parts])
                values *= each**steps.count
            found.append(values)
            start += block
            left = float(np.abs(found[-1]).max()) * (self.c / (self.c + t[-1])) ** 2
        self.moments = np.concatenate(found)
        return left

    def delta(self, epsilon: float) -> float:
        z = self.c + 1j * self.spacing * np.arange(self.moments.size)
        values = (self.moments * np.exp(-1j * z.imag * epsilon) / (z * (z + 1.0))).real
        total = self.spacing * (values.sum() - 0.5 * values[0]) / math.pi
        return float(total) * math.exp(self.at - self.c * epsilon)


def _each_direction(setting: Setting, records: int = 1) -> list[Steps]:
    q, sigma, count, delta, adjacency = setting
    if q == 1.0:  # the mean of T releases holds all that they tell, and all records join
        sigma, count, records = sigma / math.sqrt(count) / records, 1, 1
    return [Steps(q, sigma, count, delta, each, records) for each in DIRECTIONS[adjacency]]


def true_delta(setting: Setting, epsilon: float) -> float:
    """δ(ε), accurate where it is not far below the setting's own δ."""
    each = [
        math.exp(log_one_step_delta(steps, epsilon))
        if steps.count == 1
        else Line([steps], epsilon).delta(epsilon)
        for steps in _each_direction(setting)
    ]
    return max(each)


def true_epsilon(setting: Setting, records: int = 1) -> tuple[float, float]:
    """(the ε at which δ(ε) = δ, 0 if δ is smaller everywhere; how far two lines disagree)."""
    return max(_epsilon([steps]) for steps in _each_direction(setting, records))


def true_epsilon_together(settings: Sequence[Setting]) -> tuple[float, float]:
    """The same for several runs on the same data, which name one δ and one adjacency."""
    directions = zip(*map(_each_direction, settings), strict=True)
    return max(_epsilon(list(kinds)) for kinds in directions)


def _epsilon(kinds: list[Steps]) -> tuple[float, float]:
    steps, delta = kinds[0], kinds[0].delta
    if len(kinds) == steps.count == steps.records == 1:
        if log_one_step_delta(steps, 0.0) <= math.log(delta):
            return 0.0, 0.0

        def excess(epsilon: float) -> float:
            return max(log_one_step_delta(steps, epsilon), -1e6) - math.log(delta)

        return float(brentq(excess, 0.0, steps.markov(), rtol=1e-13)), 0.0
    # Basic composition is where the search begins.
    high = sum(each.markov() for each in kinds)
    nearer = _on(Line(kinds, high), delta, high)
    found = _on(Line(kinds, nearer), delta, nearer)
    other = _on(Line(kinds, nearer, aside=1.05), delta, nearer)
    return max(found, 0.0), abs(found - other)


def _on(line: Line, delta: float, start: float) -> float:
    """Where the δ of one line is the wanted one."""
    low = start
    while line.delta(low) <= delta:
        low -= 0.5 / line.c
    top = low + 0.5 / line.c
    while line.delta(top) > delta:
        top += 0.5 / line.c
    return float(brentq(lambda e: line.delta(e) / delta - 1.0, low, top, rtol=1e-12))


def settings() -> list[Setting]:
    """The table: settings once priced too low, and a spread over q, σ, T, δ and adjacency."""
    once_wrong = [
        (0.02, 50.0, 100_000, 1e-12),
        (0.01, 20.0, 100_000, 1e-11),
        (0.0027, 1.0, 6552, 1e-12),
        (0.1, 100.0, 100_000, 1e-9),
        (1e-4, 0.2, 10_000, 1e-12),
        (1.0, 50.0, 1_000_000, 1e-12),
        (1.0, 50.0, 1_000_000, 1e-14),
    ]
    spread = [
        *itertools.product((0.02,), (0.8, 1.947, 14.6), (500,), (5e-6, 1e-10, 1e-20, 1e-30)),
        *itertools.product((1e-4, 1e-3), (0.6, 1.0, 3.0), (10_000, 1_000_000), (1e-8, 1e-15)),
        *itertools.product((0.1, 0.5), (2.0, 20.0, 100.0), (50, 2_000), (1e-5, 1e-25)),
        *itertools.product((0.01,), (0.4, 1.0, 5.0), (1,), (1e-5, 1e-12, 1e-30)),
        *itertools.product((1.0,), (0.2, 1.0, 100.0), (1, 100), (1e-5, 1e-30)),
    ]
    chosen: list[Setting] = []
    for adjacency, part in (("add-remove", spread), ("replace-one", spread[::3])):
        chosen += [(*each, adjacency) for each in (*once_wrong, *part)]
    return chosen


def main() -> None:
    rows = []
    for setting in settings():
        names = ("sampling_prob", "noise_multiplier", "num_steps", "delta", "adjacency")
        epsilon, error = true_epsilon(setting)
        row = dict(zip(names, setting, strict=True))
        rows.append({**row, "epsilon": epsilon, "error": error})
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    lines = ",\n".join(json.dumps(row) for row in rows)
    TABLE.write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
