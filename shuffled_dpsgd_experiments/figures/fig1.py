"""Figure 1: two Gaussians before and after shuffling two coordinates.

The paper reports ‖P − Q‖_F on a grid over [−10, 10]² as 18.53 and 13.96, without its grid. The
Frobenius norm grows with the number of grid points; the exact L2 norms are sqrt((1−e⁻⁴)/2π) and
sqrt((1−e⁻⁴)/4π), a ratio of √2 on any fine grid, which the paper's two figures do not have. Total
variation is computed as well, because that is what limits a distinguisher.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from shuffled_dpsgd.reports.style import BLUE, INK, RED
from shuffled_dpsgd_experiments.figures.output import FigureRecipe

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Array: TypeAlias = npt.NDArray[np.float64]

EXTENT = 10.0
SHIFT = 2.0
GRID_POINTS = 1000
PAPER_FROBENIUS = (18.53, 13.96)


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One pair of distributions: centres of the equally weighted unit Gaussians, and distances."""

    label: str
    centres_p: tuple[tuple[float, float], ...]
    centres_q: tuple[tuple[float, float], ...]
    exact_l2: float
    frobenius: float
    total_variation: float


def compute(grid_points: int = GRID_POINTS) -> tuple[Panel, Panel]:
    """The unshuffled and the shuffled pair with their distances."""
    plain = (((-SHIFT, 0.0),), ((SHIFT, 0.0),))
    mixed = (((-SHIFT, 0.0), (0.0, -SHIFT)), ((SHIFT, 0.0), (0.0, SHIFT)))
    return (
        _panel("unshuffled", *plain, grid_points),
        _panel("shuffled", *mixed, grid_points),
    )


def density(centres: tuple[tuple[float, float], ...], x: Array, y: Array) -> Array:
    """Mean of unit Gaussians at `centres`."""
    parts = [np.exp(-0.5 * ((x - a) ** 2 + (y - b) ** 2)) for a, b in centres]
    return sum(parts, np.zeros_like(x)) / (2.0 * math.pi * len(centres))


def draw(panels: tuple[Panel, Panel]) -> Figure:
    """Contours of both pairs on one scale."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.2, 4.1), layout="constrained")
    for axes, panel in zip(figure.subplots(1, 2, sharey=True), panels, strict=True):
        _draw_panel(axes, panel)
    figure.supxlabel("first coordinate", fontsize=9.5)
    figure.supylabel("second coordinate", fontsize=9.5)
    return figure


def to_json(panels: tuple[Panel, Panel]) -> dict[str, Any]:
    """Centres and distances; the densities follow from the centres."""
    return {
        "grid_points": GRID_POINTS,
        "extent": EXTENT,
        "paper_frobenius": list(PAPER_FROBENIUS),
        "panels": [vars(panel) for panel in panels],
    }


def _panel(
    label: str,
    centres_p: tuple[tuple[float, float], ...],
    centres_q: tuple[tuple[float, float], ...],
    grid_points: int,
) -> Panel:
    axis = np.linspace(-EXTENT, EXTENT, grid_points)
    x, y = np.meshgrid(axis, axis)
    difference = density(centres_p, x, y) - density(centres_q, x, y)
    cell = (axis[1] - axis[0]) ** 2
    return Panel(
        label=label,
        centres_p=centres_p,
        centres_q=centres_q,
        exact_l2=_exact_l2(centres_p, centres_q),
        frobenius=float(np.linalg.norm(difference)),
        total_variation=float(0.5 * np.abs(difference).sum() * cell),
    )


def _exact_l2(
    centres_p: tuple[tuple[float, float], ...], centres_q: tuple[tuple[float, float], ...]
) -> float:
    """∫(P−Q)² by the inner product of unit Gaussians, e^{−‖a−b‖²/4}/4π."""
    signed = [(c, 1.0 / len(centres_p)) for c in centres_p]
    signed += [(c, -1.0 / len(centres_q)) for c in centres_q]
    total = sum(
        wa * wb * math.exp(-((a[0] - b[0]) ** 2 + (a[1] - b[1]) ** 2) / 4.0)
        for a, wa in signed
        for b, wb in signed
    )
    return math.sqrt(total / (4.0 * math.pi))


def _draw_panel(axes: Axes, panel: Panel) -> None:
    axis = np.linspace(-6.0, 6.0, 300)
    x, y = np.meshgrid(axis, axis)
    for name, centres, colour in (("P", panel.centres_p, BLUE), ("Q", panel.centres_q, RED)):
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
    axes.set_title(panel.label)
    axes.text(
        0.03,
        0.97,
        f"L2 distance {panel.exact_l2:.4f}\ntotal variation {panel.total_variation:.4f}",
        transform=axes.transAxes,
        fontsize=8.5,
        color=INK,
        va="top",
    )


RECIPE = FigureRecipe(
    name="fig1",
    title="Two Gaussians before and after shuffling",
    compute=compute,
    draw=draw,
    to_json=to_json,
)
