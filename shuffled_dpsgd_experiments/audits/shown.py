"""How the paper's audit and the knock-out are shown to people."""

from __future__ import annotations

from collections.abc import Callable

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from shuffled_dpsgd_experiments.audits.black_box import BlackBoxReport
from shuffled_dpsgd_experiments.audits.paper_audit import PaperRow, PaperSetting, Reading


def show_paper(rows: list[PaperRow], setting: PaperSetting, console: Console | None = None) -> None:
    """Table 6 of the paper beside what its estimator prints on pure noise."""
    out = console or Console()
    table = Table(
        title="The paper's audit: Dirac canary read at a fixed index, "
        f"{setting.num_observations}+{setting.num_observations} steps, "
        f"d = {setting.dimension:,}, c'/c = {setting.batch_clip:g}",
        title_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
    )
    table.add_column("claimed ε of the run (heuristic)")
    for row in rows:
        table.add_column(f"{row.run_epsilon:g}", justify="right")
    lines: tuple[tuple[str, Callable[[PaperRow], str]], ...] = (
        ("ε of one step by its formula (heuristic)", lambda row: f"{row.step_epsilon:.3f}"),
        ("noise multiplier", lambda row: f"{row.noise_multiplier:.3f}"),
        (
            "audited ε printed in the paper",
            lambda row: f"{row.printed:.4f}" if row.printed else "–",
        ),
        ("its estimator, this run (measured, no level)", lambda row: f"{row.estimate.epsilon:.3f}"),
        ("  strict reading, 5 to 95 %", lambda row: _reading(row.strict, noise=False)),
        ("    the same on pure noise", lambda row: _reading(row.strict, noise=True)),
        ("  literal reading, 5 to 95 %", lambda row: _reading(row.literal, noise=False)),
        ("    the same on pure noise", lambda row: _reading(row.literal, noise=True)),
        ("Clopper–Pearson at 95 % (measured)", lambda row: f"{row.bound.epsilon:.3f}"),
        ("order statistics at 95 % (measured)", lambda row: f"{row.order_statistics.epsilon:.3f}"),
    )
    for label, cell in lines:
        table.add_row(label, *(cell(row) for row in rows))
    out.print(table)
    for lack in rows[0].estimate.assumptions if rows else ():
        out.print(f"  lacks: {lack}")


def show_black_box(report: BlackBoxReport, console: Console | None = None) -> None:
    """Both attacks on all arms, then what differs between them."""
    out = console or Console()
    table = Table(
        title=f"What a black box learns: {report.setting.num_seeds} seeds, "
        f"{report.setting.num_canaries} mislabelled records ({report.seconds:.0f} s)",
        title_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
    )
    columns = ("shuffle", "attack", "area under ROC", "TPR at 1 % FPR", "one-run ε (measured)")
    for column in columns:
        table.add_column(column, justify="left" if column in ("shuffle", "attack") else "right")
    found = report.to_json()
    for name, arm in found["arms"].items():
        for attack in ("loss", "ratio"):
            table.add_row(
                name,
                attack,
                f"{arm[attack]['pooled_area']:.3f}",
                f"{arm[attack]['pooled_tpr_at_1_percent_fpr']:.3f}",
                f"{arm['largest_one_run_bound']['epsilon']:.2f}" if attack == "loss" else "",
            )
    out.print(table)
    for attack, gap in found["on_minus_off"].items():
        out.print(
            f"  {attack} attack, area with shuffle minus without: {gap['mean_difference']:+.4f} "
            f"({100 * report.confidence:g} %: {gap['low']:+.4f} to {gap['high']:+.4f})"
        )
    out.print(
        "  with the same noise drawn in the un-permuted frame no record's loss differs by more "
        f"than {report.largest_paired_difference:.1e}: the same function, run by run"
    )


def _reading(reading: Reading, *, noise: bool) -> str:
    """The range of finite figures, and how often the figure is infinite."""
    quantiles = reading.quantiles_on_noise if noise else reading.quantiles
    infinite = reading.infinite_on_noise if noise else reading.infinite
    shown = "" if quantiles is None else f"{quantiles[0]:.2f} – {quantiles[2]:.2f}"
    return shown + (f", ∞ in {100 * infinite:.0f} %" if infinite else "")
