"""The frontier as a figure: one panel for each workload, certified ε on a common axis."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shuffled_dpsgd.reports.style import BLUE, HELDOUT, HEURISTIC, INK, MUTED, PROVEN
from shuffled_dpsgd_experiments.exhibits import in_clips
from shuffled_dpsgd_experiments.frontier.curves import BAND, SPLIT, Curves, Measured, statement

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The claimed ε from small to large.
_COLOURS = (HEURISTIC, BLUE, HELDOUT)
_MARKERS = ("o", "s", "^")


def caption(curves: Sequence[Curves]) -> str:
    """What stands under the figure."""
    return (
        f"{statement(curves)} Mean over seeds, bands from the {BAND[0]}th to the {BAND[1]}th "
        "percentile, on held-out test sets. Both methods have the same model, batch, steps "
        "and clip c. DP-SGD is compared on the line between its points. A hollow "
        "mark is where the claim would put the best point. Certified ε credits the shuffle with "
        "nothing, and no accountant that knows only clip, sampling rate, noise and steps can "
        "prove less. No ε covers the tuning of learning rates, which was the same for both sides."
    )


def draw(curves: Sequence[Curves]) -> Figure:
    """Accuracy over certified ε, with the sentence under it."""
    from matplotlib.figure import Figure

    width = 4.4 * len(curves) + 0.6
    lines = textwrap.wrap(caption(curves), width=int(17 * width))
    figure = Figure(figsize=(width, 4.0 + 0.16 * len(lines)), layout="constrained")
    panels = figure.subplots(1, len(curves), squeeze=False)[0]
    claims = sorted({claim for each in curves for claim in each.workload.claims})
    shown: dict[str, Any] = {}
    for axes, each in zip(panels, curves, strict=True):
        _panel(axes, each, claims)
        handles, labels = axes.get_legend_handles_labels()
        shown |= dict(zip(labels, handles, strict=True))
    panels[0].set_ylabel("accuracy, %")
    columns = len(shown) if len(curves) > 1 else 1
    figure.legend(shown.values(), list(shown), loc="outside upper center", ncols=columns)
    figure.supxlabel("\n".join(lines), fontsize=8, color=INK, x=0.01, ha="left")
    return figure


def _panel(axes: Axes, curves: Curves, claims: list[float]) -> None:
    from matplotlib.ticker import FuncFormatter, NullLocator

    axes.set_title(curves.workload.title)
    axes.set(xscale="log", xlabel="certified ε (proven)")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    _line(axes, curves.plain(), PROVEN, "D", "DP-SGD")
    if curves.floor is not None:
        _line(axes, curves.floor.plain(), MUTED, "x", "DP-SGD, logistic regression")
    for claim, colour, marker in zip(claims, _COLOURS, _MARKERS, strict=False):
        found = curves.papers(claim)
        if not found:
            continue
        _line(axes, found, colour, marker, f"paper's algorithm, ε = {claim:g} claimed")
        best = max(found, key=lambda each: each.scores[SPLIT].mean)
        height = best.scores[SPLIT].mean
        axes.plot([claim, best.certified_epsilon], [height] * 2, ":", color=colour, linewidth=1)
        axes.plot(claim, height, marker, color=colour, markerfacecolor="white", markersize=5)
    _name_clips(axes, curves)


def _line(axes: Axes, found: list[Measured], colour: str, marker: str, label: str) -> None:
    places = [each.certified_epsilon for each in found]
    scores = [each.scores[SPLIT] for each in found]
    axes.fill_between(
        places, [s.low for s in scores], [s.high for s in scores], color=colour, alpha=0.15, lw=0
    )
    means = [score.mean for score in scores]
    axes.plot(places, means, marker=marker, color=colour, markersize=4, label=label)


def _name_clips(axes: Axes, curves: Curves) -> None:
    """c' beside the points of the first claim."""
    for each in curves.papers(curves.workload.claims[0]):
        axes.annotate(
            f"c' = {in_clips(each.point.batch_clip_ratio or 0.0)}",
            (each.certified_epsilon, each.scores[SPLIT].mean),
            xytext=(3, -11),
            textcoords="offset points",
            fontsize=7,
            color=MUTED,
        )
