"""Trade-off and ROC curves of an audit, with the curve each claim allows drawn over them.

A measured curve that passes below a claim's trade-off curve (above it in the ROC) contradicts the
claim as far as the eye can tell; the verdict, with its confidence, is in the report.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from shuffled_dpsgd.auditing.estimators.curves import claim_trade_off, roc
from shuffled_dpsgd.auditing.estimators.one_run import Inclusion
from shuffled_dpsgd.auditing.estimators.scores import Floats, ScorePair
from shuffled_dpsgd.auditing.verdict import AuditReport
from shuffled_dpsgd.reports.style import (
    BLUE,
    HEURISTIC,
    MUTED,
    ORANGE,
    PROVEN,
    house_style,
    save_drawing,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from shuffled_dpsgd.auditing.black_box import BlackBoxReport

FLOOR = 1e-4
CLAIM_STYLES = {"proven": (PROVEN, "-"), "heuristic": (HEURISTIC, "--"), "measured": (MUTED, ":")}


@house_style()
def draw(report: AuditReport) -> Figure:
    """Trade-off curves (type II over type I error) on the left, ROC on logarithmic axes right."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.5, 5.0), layout="constrained")
    trade_off, logarithmic = figure.subplots(1, 2)
    grid = np.concatenate([[0.0], np.geomspace(FLOOR, 1.0, 400)])
    for attack in report.attacks:
        curve = roc(_two_worlds(attack.evidence.scores))
        fpr, tpr = curve.false_positive_rate, curve.true_positive_rate
        trade_off.plot(fpr, 1.0 - tpr, linewidth=1.2, label=attack.label)
        logarithmic.plot(_visible(fpr), _visible(tpr), linewidth=1.2)
    for claim in report.claims:
        color, dashes = CLAIM_STYLES[claim.kind]
        least = claim_trade_off(grid, epsilon=claim.epsilon, delta=claim.delta)
        label = f"claim: ε = {claim.epsilon:.3g} ({claim.kind})"
        trade_off.plot(grid, least, color=color, linestyle=dashes, linewidth=1.8, label=label)
        logarithmic.plot(
            _visible(grid), _visible(1.0 - least), color=color, linestyle=dashes, linewidth=1.8
        )
    trade_off.set(
        title="Trade-off",
        xlabel="type I error (false alarms)",
        ylabel="type II error (misses)",
    )
    logarithmic.set(
        title="ROC, logarithmic",
        xlabel="false-positive rate",
        ylabel="true-positive rate",
        xscale="log",
        yscale="log",
        xlim=(FLOOR, 1.0),
        ylim=(FLOOR, 1.2),
    )
    figure.legend(loc="outside lower center", ncols=3)
    figure.suptitle(f"Audit of {report.unit}: what each adversary can tell apart")
    return figure


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
            rates = _visible(curve.false_positive_rate), _visible(curve.true_positive_rate)
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
    """As `save`, for the drawing of a black-box audit."""
    return _write(draw_black_box(report), stem)


def save(report: AuditReport, stem: Path) -> tuple[Path, ...]:
    """Write the drawing as PNG and SVG beside each other; returns what was written."""
    return _write(draw(report), stem)


def _write(figure: Figure, stem: Path) -> tuple[Path, ...]:
    written = tuple(stem.with_suffix(suffix) for suffix in (".png", ".svg"))
    for path in written:
        save_drawing(figure, path)
    return written


def _two_worlds(scores: ScorePair | Inclusion) -> ScorePair:
    """The canaries of one run as two worlds: those that were left out, and those that were not."""
    if isinstance(scores, ScorePair):
        return scores
    return ScorePair(out=scores.scores[~scores.included], present=scores.scores[scores.included])


def _visible(rates: Floats) -> Floats:
    return np.maximum(rates, FLOOR)
