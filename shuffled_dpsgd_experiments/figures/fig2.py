"""Figure 2: the CDF of log Σ e^{Y_j} by five methods at d = 1e8.

The paper states σ = 0.25 and no more. In its theorem the exponents are <y, g>/σ², of standard
deviation 1/σ = 4; read as the standard deviation itself it is 0.25. Both are drawn. Monte-Carlo is
the ground truth, with more draws than the paper's 1000 because they cost milliseconds here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from shuffled_dpsgd.reports.style import BLUE, GREEN, INK, ORANGE, RED
from shuffled_dpsgd_experiments.exhibits import Exhibit, ExhibitRow, figure_exhibit, in_one_file
from shuffled_dpsgd_experiments.figures.lognormal_sum import METHODS, draw_log

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DIMENSION = 10**8
SIGMA = 0.25
FIT_DRAWS, TRUTH_DRAWS, AXIS_DRAWS = 1000, 20_000, 2000
AXIS_POINTS = 400
# Of the points at which distances are taken, one of so many is kept and drawn.
KEPT = 4
TRUTH = "monte-carlo"
TITLE = "The law of a sum of log-normals by five methods"
# Name, colour, dashes and width of each method.
LOOK = {
    "monte-carlo": ("Monte-Carlo (ground truth)", INK, "-", 4.5),
    "fenton-wilkinson": ("Fenton–Wilkinson (the theorem's)", RED, "-", 1.8),
    "schwartz-yeh": ("Schwartz–Yeh", BLUE, "-", 1.8),
    "least-squares": ("least squares", ORANGE, "--", 1.8),
    "kernel-density": ("kernel density", GREEN, ":", 2.2),
}
PAPER = {
    "fenton-wilkinson": "sufficiently close to the ground truth",
    "schwartz-yeh": "poor at lower values",
    "least-squares": "better than Fenton–Wilkinson",
    "kernel-density": "better than Fenton–Wilkinson",
}


def compute() -> dict[str, Any]:
    """The theorem's reading of σ, and the other one under `other_reading`."""
    return {
        **compute_at(1.0 / SIGMA),
        "dimension": DIMENSION,
        "fit_draws": FIT_DRAWS,
        "truth_draws": TRUTH_DRAWS,
        "other_reading": compute_at(SIGMA),
    }


def compute_at(std: float, seed: int = 0) -> dict[str, Any]:
    """All five CDFs where the Monte-Carlo one moves from 0 to 1."""
    fitted = draw_log(DIMENSION, std, FIT_DRAWS, seed)
    truth = draw_log(DIMENSION, std, TRUTH_DRAWS, seed + 1)
    low, high = np.quantile(draw_log(DIMENSION, std, AXIS_DRAWS, seed + 2), [0.0005, 0.9995])
    span = high - low
    axis = np.linspace(low - 0.35 * span, high + 0.05 * span, AXIS_POINTS)
    values = {
        name: method(DIMENSION, std, truth if name == TRUTH else fitted)(axis)
        for name, method in METHODS.items()
    }
    return {
        "std": std,
        "kolmogorov": {
            name: float(np.abs(each - values[TRUTH]).max()) for name, each in values.items()
        },
        "log_sum": [round(float(value), 7) for value in axis[::KEPT]],
        "cdf": {
            name: [round(float(value), 6) for value in each[::KEPT]]
            for name, each in values.items()
        },
    }


def show(raw: dict[str, Any]) -> Exhibit:
    """How far each method is from the truth, beside what the paper says of it."""
    distances = {name: raw["kolmogorov"][name] for name in PAPER}
    other = raw["other_reading"]
    worst = max(distances, key=lambda name: distances[name])
    return figure_exhibit(
        "fig2",
        TITLE,
        raw,
        [
            ExhibitRow(
                what=LOOK[name][0],
                paper=PAPER[name],
                ours=f"off by {distance:.2f} in cumulative probability, at most; by "
                f"{other['kolmogorov'][name]:.2f} in the other reading",
                verdict="the farthest of the four from the truth" if name == worst else "",
            )
            for name, distance in distances.items()
        ],
        f"The sum of {raw['dimension']:.0e} log-normals whose logarithms have standard deviation "
        f"{raw['std']:g}, as in the theorem, or {other['std']:g}, the other reading of the paper's "
        f"σ; truth from {raw['truth_draws']:,} exact draws.",
    )


def draw(raw: dict[str, Any]) -> Figure:
    """A panel for each reading, the truth thick underneath, distances in the legend."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.4, 4.2), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, each in zip(panels, (raw, raw["other_reading"]), strict=True):
        _draw_panel(axes, each)
    panels[0].set_ylabel("cumulative probability")
    exponent = round(float(np.log10(raw["dimension"])))
    figure.supxlabel(f"log of a sum of $10^{{{exponent}}}$ log-normals", fontsize=9.5)
    return figure


def _draw_panel(axes: Axes, each: dict[str, Any]) -> None:
    for name in (TRUTH, *PAPER):
        label, colour, dashes, width = LOOK[name]
        off = "" if name == TRUTH else f", off by {each['kolmogorov'][name]:.2f}"
        look: dict[str, Any] = {"alpha": 0.35} if name == TRUTH else {}
        look |= {"color": colour, "linewidth": width, "label": label + off}
        axes.plot(each["log_sum"], each["cdf"][name], dashes, **look)
    axes.set(ylim=(-0.02, 1.02), xlim=(each["log_sum"][0], each["log_sum"][-1]))
    axes.set_title(f"logarithms of std {each['std']:g}")
    legend = axes.legend(loc="lower right", title="largest distance to the truth")
    legend.set_alignment("left")


FIGURE = in_one_file("fig2", TITLE, lambda scale: compute(), show, draw, has_scales=False)
