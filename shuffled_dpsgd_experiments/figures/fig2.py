"""Figure 2: the CDF of log Σ e^{Y_j} by five methods at d = 1e8.

The paper states σ = 0.25 and no more; in its theorem the exponents are <y, g>/σ², of standard
deviation 1/σ = 4, and that is what is drawn. Monte-Carlo is the ground truth, with more draws than
the paper's 1000 because they cost milliseconds here.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np

from shuffled_dpsgd.environment import environment
from shuffled_dpsgd.reports.style import BLUE, GREEN, INK, ORANGE, RED
from shuffled_dpsgd_experiments.exhibits import Exhibit, ExhibitRow, figure_exhibit, in_one_file
from shuffled_dpsgd_experiments.figures.lognormal_sum import METHODS, LognormalSum

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DIMENSION = 10**8
SIGMA = 0.25
FIT_DRAWS = 1000
TRUTH_DRAWS = 20_000
AXIS_DRAWS = 2000
AXIS_POINTS = 400
# Of the points at which distances are taken, one of so many is kept and drawn.
KEPT = 4
TRUTH = "monte-carlo"
TITLE = "The law of a sum of log-normals by five methods"
# Colour, dashes and width of each method.
LOOK = {
    "monte-carlo": (INK, "-", 4.5),
    "fenton-wilkinson": (RED, "-", 1.8),
    "schwartz-yeh": (BLUE, "-", 1.8),
    "least-squares": (ORANGE, "--", 1.8),
    "kernel-density": (GREEN, ":", 2.2),
}
LABEL = {
    "monte-carlo": "Monte-Carlo (ground truth)",
    "fenton-wilkinson": "Fenton–Wilkinson (the theorem's)",
    "schwartz-yeh": "Schwartz–Yeh",
    "least-squares": "least squares",
    "kernel-density": "kernel density",
}
PAPER = {
    "fenton-wilkinson": "sufficiently close to the ground truth",
    "schwartz-yeh": "poor at lower values",
    "least-squares": "better than Fenton–Wilkinson",
    "kernel-density": "better than Fenton–Wilkinson",
}


def compute(dimension: int = DIMENSION, sigma: float = SIGMA, seed: int = 0) -> dict[str, Any]:
    """All five CDFs where the Monte-Carlo one moves from 0 to 1."""
    total = LognormalSum(dimension=dimension, std=1.0 / sigma)
    cdfs, seconds = {}, {}
    for name, method in METHODS.items():
        started = time.perf_counter()
        draws = TRUTH_DRAWS if name == TRUTH else FIT_DRAWS
        cdfs[name] = method(total, draws=draws, seed=seed + (name == TRUTH))
        seconds[name] = round(time.perf_counter() - started, 4)
    sample = total.draw_log(AXIS_DRAWS, np.random.default_rng(seed + 2))
    low, high = np.quantile(sample, [0.0005, 0.9995])
    span = high - low
    axis = np.linspace(low - 0.35 * span, high + 0.05 * span, AXIS_POINTS)
    values = {name: cdf(axis) for name, cdf in cdfs.items()}
    return {
        "dimension": dimension,
        "std": total.std,
        "fit_draws": FIT_DRAWS,
        "truth_draws": TRUTH_DRAWS,
        "kolmogorov": {
            name: float(np.abs(each - values[TRUTH]).max()) for name, each in values.items()
        },
        "seconds": seconds,
        "log_sum": [round(float(value), 5) for value in axis[::KEPT]],
        "cdf": {
            name: [round(float(value), 6) for value in each[::KEPT]]
            for name, each in values.items()
        },
        "environment": environment(),
    }


def show(raw: dict[str, Any]) -> Exhibit:
    """How far each method is from the truth, beside what the paper says of it."""
    distances = {name: raw["kolmogorov"][name] for name in PAPER}
    worst = max(distances, key=lambda name: distances[name])
    exponent = round(float(np.log10(raw["dimension"])))
    return figure_exhibit(
        "fig2",
        TITLE,
        raw,
        [
            ExhibitRow(
                what=LABEL[name],
                paper=PAPER[name],
                ours=f"off by {distance:.2f} in cumulative probability, at most",
                verdict="the farthest of the four from the truth" if name == worst else "",
            )
            for name, distance in distances.items()
        ],
        f"The sum of 10^{exponent} log-normals whose logarithms have standard deviation "
        f"{raw['std']:g}, as in the theorem; truth from {raw['truth_draws']:,} exact draws.",
    )


def draw(raw: dict[str, Any]) -> Figure:
    """One axis, the truth thick underneath, distances in the legend."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.6, 4.2), layout="constrained")
    axes = figure.subplots()
    for name in (TRUTH, *PAPER):
        colour, dashes, width = LOOK[name]
        off = "" if name == TRUTH else f", off by {raw['kolmogorov'][name]:.2f}"
        axes.plot(
            raw["log_sum"],
            raw["cdf"][name],
            dashes,
            color=colour,
            linewidth=width,
            alpha=0.35 if name == TRUTH else 1.0,
            label=LABEL[name] + off,
        )
    axes.set(xlabel="log of the sum", ylabel="cumulative probability", ylim=(-0.02, 1.02))
    axes.set_xlim(raw["log_sum"][0], raw["log_sum"][-1])
    exponent = round(float(np.log10(raw["dimension"])))
    axes.set_title(f"Sum of $10^{{{exponent}}}$ log-normals, logarithms of std {raw['std']:g}")
    legend = axes.legend(loc="lower right", title="largest distance to the truth")
    legend.set_alignment("left")
    return figure


FIGURE = in_one_file("fig2", TITLE, lambda scale: compute(), show, draw, has_scales=False)
