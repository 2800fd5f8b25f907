"""The knock-out drawn: membership attacks with the shuffle and without."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from shuffled_dpsgd.auditing.estimators.curves import roc
from shuffled_dpsgd.auditing.plots import visible, write
from shuffled_dpsgd.reports.style import BLUE, MUTED, ORANGE, house_style
from shuffled_dpsgd_experiments.audits.black_box import BlackBoxReport

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@house_style()
def draw_black_box(report: BlackBoxReport) -> Figure:
    """Pooled ROC of both attacks with the shuffle and without, and the area of every run."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.5, 4.6), layout="constrained")
    curves, areas = figure.subplots(1, 2)
    looks = {"loss": ("loss", BLUE), "ratio": ("likelihood ratio", ORANGE)}
    for attack, (name, colour) in looks.items():
        for arm, dashes in (("off", "-"), ("on", "--")):
            curve = roc(report.pooled(arm, attack))
            rates = visible(curve.false_positive_rate), visible(curve.true_positive_rate)
            curves.plot(*rates, color=colour, linestyle=dashes, label=f"{name}, shuffle {arm}")
        off = report.areas("off", attack)
        for arm, mark, words in (("on", "o", "own noise"), ("on-paired", "+", "same noise")):
            label = f"{name}, {words}"
            areas.plot(off, report.areas(arm, attack), mark, color=colour, label=label)
    areas.axline((1.0, 1.0), slope=1.0, color=MUTED, linewidth=0.8)
    curves.set(
        title="All seeds pooled",
        xlabel="false-positive rate",
        ylabel="true-positive rate",
        xscale="log",
        yscale="log",
        xlim=(1e-3, 1.0),
        ylim=(1e-3, 1.2),
    )
    areas.set(
        title="Seed by seed",
        xlabel="area under ROC, shuffle off",
        ylabel="area under ROC, shuffle on",
    )
    for axes in (curves, areas):
        axes.legend()
    figure.suptitle("Membership attacks on the released function: with the shuffle and without")
    return figure


def save_black_box(report: BlackBoxReport, stem: Path) -> tuple[Path, ...]:
    """Write the drawing as PNG and SVG beside each other; returns what was written."""
    return write(draw_black_box(report), stem)
