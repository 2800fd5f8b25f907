"""Figure 1: two Gaussians before and after shuffling two coordinates.

The paper reports ‖P − Q‖_F on a grid over [−10, 10]² as 18.53 and 13.96, without its grid. The
Frobenius norm grows with the number of grid points; the exact L2 norms are sqrt((1−e⁻⁴)/2π) and
sqrt((1−e⁻⁴)/4π), a ratio of √2 on any fine grid, which the paper's two figures do not have. Total
variation is computed as well, because that is what limits a distinguisher.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from shuffled_dpsgd.reports.style import BLUE, INK, RED
from shuffled_dpsgd_experiments.exhibits import Exhibit, ExhibitRow, figure_exhibit, in_one_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Array: TypeAlias = npt.NDArray[np.float64]
Centres: TypeAlias = Sequence[Sequence[float]]

EXTENT = 10.0
SHIFT = 2.0
GRID_POINTS = 1000
PAPER_FROBENIUS = (18.53, 13.96)
TITLE = "Two Gaussians before and after shuffling"
# Centres of the equally weighted unit Gaussians of P and of Q.
PAIRS: dict[str, tuple[Centres, Centres]] = {
    "unshuffled": (((-SHIFT, 0.0),), ((SHIFT, 0.0),)),
    "shuffled": (((-SHIFT, 0.0), (0.0, -SHIFT)), ((SHIFT, 0.0), (0.0, SHIFT))),
}


def compute(grid_points: int = GRID_POINTS) -> dict[str, Any]:
    """The unshuffled and the shuffled pair with their distances."""
    return {
        "grid_points": grid_points,
        "paper_frobenius": list(PAPER_FROBENIUS),
        "panels": [
            {
                "label": label,
                "centres_p": p,
                "centres_q": q,
                "exact_l2": exact_l2(p, q),
                **distances_on_a_grid(p, q, grid_points),
            }
            for label, (p, q) in PAIRS.items()
        ],
    }


def density(centres: Centres, x: Array, y: Array) -> Array:
    """Mean of unit Gaussians at `centres`."""
    parts = [np.exp(-0.5 * ((x - a) ** 2 + (y - b) ** 2)) for a, b in centres]
    return sum(parts, np.zeros_like(x)) / (2.0 * math.pi * len(centres))


def distances_on_a_grid(p: Centres, q: Centres, grid_points: int) -> dict[str, float]:
    axis = np.linspace(-EXTENT, EXTENT, grid_points)
    x, y = np.meshgrid(axis, axis)
    difference = density(p, x, y) - density(q, x, y)
    cell = (axis[1] - axis[0]) ** 2
    return {
        "frobenius": float(np.linalg.norm(difference)),
        "total_variation": float(0.5 * np.abs(difference).sum() * cell),
    }


def exact_l2(p: Centres, q: Centres) -> float:
    """∫(P−Q)² by the inner product of unit Gaussians, e^{−‖a−b‖²/4}/4π."""
    signed = [(c, 1.0 / len(p)) for c in p] + [(c, -1.0 / len(q)) for c in q]
    total = sum(
        wa * wb * math.exp(-((a[0] - b[0]) ** 2 + (a[1] - b[1]) ** 2) / 4.0)
        for a, wa in signed
        for b, wb in signed
    )
    return math.sqrt(total / (4.0 * math.pi))


def show(raw: dict[str, Any]) -> Exhibit:
    """The printed norms beside those of a grid, with what limits a distinguisher."""
    points = raw["grid_points"]
    rows = [
        ExhibitRow(
            what=f"distance of the two laws on a grid, {panel['label']}",
            paper=f"{printed:g}",
            ours=f"{panel['frobenius']:.2f} on {points:,} × {points:,} points; exact L2 norm "
            f"{panel['exact_l2']:.4f}; total variation {panel['total_variation']:.4f}",
            verdict=_agrees(printed, panel["frobenius"]),
        )
        for printed, panel in zip(raw["paper_frobenius"], raw["panels"], strict=True)
    ]
    return figure_exhibit(
        "fig1",
        TITLE,
        raw,
        rows,
        "The paper does not state its grid, on which the norm depends. Total variation says how "
        "well the two can be told apart: the shuffle lowers it, and leaves it high.",
    )


def _agrees(printed: float, found: float) -> str:
    if abs(found - printed) < 0.005:
        return "as printed"
    return f"differs by {found / printed - 1:+.1%}; the two norms stand at √2 to 1 on any fine grid"


def draw(raw: dict[str, Any]) -> Figure:
    """Contours of both pairs on one scale."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.2, 4.1), layout="constrained")
    for axes, panel in zip(figure.subplots(1, 2, sharey=True), raw["panels"], strict=True):
        _draw_panel(axes, panel)
    figure.supxlabel("first coordinate", fontsize=9.5)
    figure.supylabel("second coordinate", fontsize=9.5)
    return figure


def _draw_panel(axes: Axes, panel: dict[str, Any]) -> None:
    axis = np.linspace(-6.0, 6.0, 300)
    x, y = np.meshgrid(axis, axis)
    for name, colour in (("P", BLUE), ("Q", RED)):
        centres = panel[f"centres_{name.lower()}"]
        values = density(centres, x, y)
        levels = values.max() * np.array([0.05, 0.2, 0.4, 0.6, 0.8])
        axes.contourf(x, y, values, levels=[*levels, values.max()], colors=[colour], alpha=0.12)
        axes.contour(x, y, values, levels=levels, colors=[colour], linewidths=1.1)
        for a, b in centres:
            axes.plot(a, b, "o", color=colour, markersize=3.5)
        outward = np.array(centres).mean(axis=0)
        x_name, y_name = outward + 2.9 * outward / np.linalg.norm(outward)
        label = axes.text(x_name, y_name, name, color=colour, fontsize=13, weight="bold")
        label.set(ha="center", va="center")
    axes.set_aspect("equal")
    axes.set(xlim=(-6, 6), ylim=(-6, 6), xticks=range(-6, 7, 2), yticks=range(-6, 7, 2))
    axes.set_title(panel["label"])
    said = f"L2 distance {panel['exact_l2']:.4f}\ntotal variation {panel['total_variation']:.4f}"
    axes.text(0.03, 0.97, said, transform=axes.transAxes, fontsize=8.5, color=INK, va="top")


FIGURE = in_one_file("fig1", TITLE, lambda scale: compute(), show, draw, has_scales=False)
