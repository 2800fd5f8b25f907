"""Trade-off and ROC curves of an audit, with the curve each claim allows drawn over them.

A measured curve that passes below a claim's trade-off curve (above it in the ROC) contradicts the
claim as far as the eye can tell; the verdict, with its confidence, is in the report.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from shuffled_dpsgd.auditing.estimators import ScorePair, claim_trade_off, roc
from shuffled_dpsgd.auditing.estimators.scores import Floats
from shuffled_dpsgd.auditing.verdict import AuditReport
from shuffled_dpsgd.reports.style import HEURISTIC, MUTED, PROVEN, house_style, save_drawing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
        scores = attack.evidence.scores
        if attack.evidence.assumptions:
            continue  # scores of single steps, while the claims are about the run
        curve = roc(scores if isinstance(scores, ScorePair) else scores.as_pair())
        fpr, tpr = curve.false_positive_rate, curve.true_positive_rate
        trade_off.plot(fpr, 1.0 - tpr, linewidth=1.2, label=attack.label)
        logarithmic.plot(visible(fpr), visible(tpr), linewidth=1.2)
    for claim in report.claims:
        color, dashes = CLAIM_STYLES[claim.kind]
        least = claim_trade_off(grid, epsilon=claim.epsilon, delta=claim.delta)
        label = f"claim: ε = {claim.epsilon:.3g} ({claim.kind})"
        trade_off.plot(grid, least, color=color, linestyle=dashes, linewidth=1.8, label=label)
        logarithmic.plot(
            visible(grid), visible(1.0 - least), color=color, linestyle=dashes, linewidth=1.8
        )
    trade_off.set(
        title="Trade-off", xlabel="type I error (false alarms)", ylabel="type II error (misses)"
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


def save(report: AuditReport, stem: Path) -> tuple[Path, ...]:
    """Write the drawing as PNG and SVG beside each other; returns what was written."""
    return write(draw(report), stem)


def write(figure: Figure, stem: Path) -> tuple[Path, ...]:
    """A drawing as PNG and SVG; returns what was written."""
    written = tuple(stem.with_suffix(suffix) for suffix in (".png", ".svg"))
    for path in written:
        save_drawing(figure, path)
    return written


def visible(rates: Floats) -> Floats:
    """Rates as logarithmic axes can show them: `FLOOR` at least."""
    return np.maximum(rates, FLOOR)
