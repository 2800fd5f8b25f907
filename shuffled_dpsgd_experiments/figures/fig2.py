"""Figure 2: the CDF of log Σ e^{Y_j} by five methods at d = 1e8.

The paper states σ = 0.25 and no more; in its theorem the exponents are <y, g>/σ², of standard
deviation 1/σ = 4, and that is what is drawn. Monte-Carlo is the ground truth, with more draws than
the paper's 1000 because they cost milliseconds here.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from shuffled_dpsgd.accounting.lognormal_sum import METHODS, LognormalSum
from shuffled_dpsgd.reports.style import BLUE, GREEN, INK, ORANGE, RED
from shuffled_dpsgd_experiments.figures.output import FigureRecipe

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Array: TypeAlias = npt.NDArray[np.float64]

DIMENSION = 10**8
SIGMA = 0.25
FIT_DRAWS = 1000
TRUTH_DRAWS = 20_000
AXIS_DRAWS = 2000
TRUTH = "monte-carlo"
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


@dataclass(frozen=True, kw_only=True)
class CdfCurves:
    """CDF values on a common axis, distance of each method to the truth, and seconds taken."""

    dimension: int
    std: float
    log_sum: Array
    cdf: dict[str, Array]
    kolmogorov: dict[str, float]
    seconds: dict[str, float]


def compute(dimension: int = DIMENSION, sigma: float = SIGMA, seed: int = 0) -> CdfCurves:
    """All five CDFs where the Monte-Carlo one moves from 0 to 1."""
    total = LognormalSum(dimension=dimension, std=1.0 / sigma)
    cdfs, seconds = {}, {}
    for name, method in METHODS.items():
        started = time.perf_counter()
        draws = TRUTH_DRAWS if name == TRUTH else FIT_DRAWS
        cdfs[name] = method(total, draws=draws, seed=seed + (name == TRUTH))
        seconds[name] = time.perf_counter() - started
    sample = total.draw_log(AXIS_DRAWS, np.random.default_rng(seed + 2))
    low, high = np.quantile(sample, [0.0005, 0.9995])
    axis = np.linspace(low - 0.35 * (high - low), high + 0.05 * (high - low), 400)
    values = {name: cdf(axis) for name, cdf in cdfs.items()}
    distance = {name: float(np.abs(v - values[TRUTH]).max()) for name, v in values.items()}
    return CdfCurves(
        dimension=dimension,
        std=total.std,
        log_sum=axis,
        cdf=values,
        kolmogorov=distance,
        seconds=seconds,
    )


def draw(curves: CdfCurves) -> Figure:
    """One axis, the truth thick underneath, distances in the legend."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.6, 4.2), layout="constrained")
    axes = figure.subplots()
    for name in (TRUTH, *(other for other in curves.cdf if other != TRUTH)):
        colour, dashes, width = LOOK[name]
        label = LABEL[name]
        if name != TRUTH:
            label += f", off by {curves.kolmogorov[name]:.2f}"
        axes.plot(
            curves.log_sum,
            curves.cdf[name],
            dashes,
            color=colour,
            linewidth=width,
            alpha=0.35 if name == TRUTH else 1.0,
            label=label,
        )
    axes.set(
        xlabel="log of the sum",
        ylabel="cumulative probability",
        ylim=(-0.02, 1.02),
        xlim=(curves.log_sum[0], curves.log_sum[-1]),
    )
    exponent = round(float(np.log10(curves.dimension)))
    axes.set_title(f"Sum of $10^{{{exponent}}}$ log-normals, logarithms of std {curves.std:g}")
    legend = axes.legend(loc="lower right", title="largest distance to the truth")
    legend.set_alignment("left")
    return figure


def to_json(curves: CdfCurves) -> dict[str, Any]:
    """Every tenth point of the axis; distances in full."""
    return {
        "dimension": curves.dimension,
        "std": curves.std,
        "fit_draws": FIT_DRAWS,
        "truth_draws": TRUTH_DRAWS,
        "kolmogorov": curves.kolmogorov,
        "seconds": {name: round(value, 4) for name, value in curves.seconds.items()},
        "log_sum": [round(float(value), 5) for value in curves.log_sum[::10]],
        "cdf": {
            name: [round(float(value), 6) for value in values[::10]]
            for name, values in curves.cdf.items()
        },
    }


RECIPE = FigureRecipe(
    name="fig2",
    title="The law of a sum of log-normals by five methods",
    compute=compute,
    draw=draw,
    to_json=to_json,
)
