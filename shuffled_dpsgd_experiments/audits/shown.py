"""How the knock-out is shown to people."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from shuffled_dpsgd.auditing.estimators import roc
from shuffled_dpsgd.auditing.plots import visible, write
from shuffled_dpsgd.cli.audit_output import plain_table
from shuffled_dpsgd.reports.style import BLUE, MUTED, ORANGE, house_style
from shuffled_dpsgd_experiments.audits.black_box import ATTACKS, BlackBoxReport

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def show_black_box(report: BlackBoxReport) -> None:
    """Both attacks on all arms, then what differs between them."""
    setting, found, out = report.setting, report.to_json(), Console()
    rows = [
        (
            name if name == "without-privacy" else f"shuffle {name}",
            attack,
            "{mean:.3f} ({low:.3f} to {high:.3f})".format(**arm[attack]["area_over_seeds"]),
            f"{arm[attack]['pooled_tpr_at_1_percent_fpr']:.3f}",
            f"{arm['largest_one_run_bound']['epsilon']:.2f}" if attack == "loss" else "",
        )
        for name, arm in found["arms"].items()
        for attack in ATTACKS
    ]
    headings = ("arm", "attack", "area under ROC", "TPR at 1 % FPR", "one-run ε (measured)")
    title = (
        f"What a black box learns: {setting.num_seeds} seeds, {setting.num_canaries} "
        f"{setting.input_canary} records ({report.seconds:.0f} s)"
    )
    out.print(plain_table(title, headings, rows, headings[:2]))
    out.print(f"  areas are means over seeds, with {100 * report.confidence:g} % intervals")
    for attack, gap in found["on_minus_off"].items():
        out.print(
            f"  {attack} attack, area with shuffle minus without: {gap['mean_difference']:+.4f} "
            f"({100 * report.confidence:g} %: {gap['low']:+.4f} to {gap['high']:+.4f})"
        )
    out.print(
        "  with the same noise drawn in the un-permuted frame no record's loss differs by more "
        f"than {report.largest_paired_difference:.1e}: the same function, run by run"
    )


@house_style()
def draw_black_box(report: BlackBoxReport) -> Figure:
    """Pooled ROC of both attacks in three arms, and the area of every run."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.5, 4.6), layout="constrained")
    curves, areas = figure.subplots(1, 2)
    looks = {"loss": ("loss", BLUE), "ratio": ("likelihood ratio", ORANGE)}
    arms = (("off", "-", "shuffle off"), ("on", "--", "shuffle on"))
    for attack, (name, colour) in looks.items():
        for arm, dashes, words in (*arms, ("without-privacy", ":", "without privacy")):
            curve = roc(report.pooled(arm, attack))
            rates = visible(curve.false_positive_rate), visible(curve.true_positive_rate)
            curves.plot(*rates, color=colour, linestyle=dashes, label=f"{name}, {words}")
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
