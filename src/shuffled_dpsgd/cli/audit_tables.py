"""How an audit is shown to people: claims first, then adversaries × estimators, then verdicts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from shuffled_dpsgd.auditing.black_box import BlackBoxReport
    from shuffled_dpsgd.auditing.checks import CheckReport
    from shuffled_dpsgd.auditing.paper_audit import PaperRow, PaperSetting, Reading
    from shuffled_dpsgd.auditing.reach import Reach
    from shuffled_dpsgd.auditing.verdict import Attack, AuditReport


def show_report(report: AuditReport, console: Console | None = None) -> None:
    """Certified ε, the paper's estimate, audited lower bounds, verdicts: in that order."""
    out = console or Console()
    out.print(f"[bold]Audit of {report.unit}[/bold] ({report.seconds:.1f} s)")
    out.print("  " + _one_line(report.setting))
    for block in report.setting.get("plan", {}).get("blocks", ()):
        shown = ("dimension", "noise_multiplier", "batch_clip_norm")
        out.print(f"  block {block['name']}: {_one_line({key: block[key] for key in shown})}")
    for claim in report.claims:
        out.print(f"  claim: {claim.describe()}")
    out.print(_attack_table(report))
    for verdict in report.verdicts:
        colour = "red" if verdict.refuted else "green"
        out.print(
            f"  ε = {verdict.claim.epsilon:.4g} ({verdict.claim.kind}): "
            f"[{colour}]{verdict.outcome}[/{colour}], strongest joint bound "
            f"{verdict.strongest_bound:.2f} (measured) by {verdict.strongest_attack}"
        )
    for note in report.notes:
        out.print(f"  note: {note}")
    if report.reach is not None:
        _show_reach(report.reach, out)


def _show_reach(reach: Reach, out: Console) -> None:
    out.print(f"  adversaries run: {', '.join(reach.ran)}")
    out.print(
        f"  they would have refuted a claim below ε = {reach.largest_bound:.2f} (measured) had one "
        "of them been right every time, and would have caught:"
    )
    for line in reach.would_have_caught:
        out.print(f"    + {line}")
    out.print("  they could not have caught:")
    for line in reach.could_not:
        out.print(f"    - {line}")


def _one_line(setting: Mapping[str, object]) -> str:
    """Names and values; nested data stays in the JSON."""
    return ", ".join(
        f"{key} {value:g}" if isinstance(value, float) else f"{key} {value}"
        for key, value in setting.items()
        if not isinstance(value, dict)
    )


def _attack_table(report: AuditReport) -> Table:
    confidences = {
        bound.confidence for attack in report.attacks for bound in attack.bounds if bound.confidence
    }
    level = f" at {100 * min(confidences):g} % each" if confidences else ""
    table = Table(
        title=f"ε (measured), lower bounds{level}",
        caption="* holds under an assumption only   † a point estimate, bounds nothing",
        title_justify="left",
        caption_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
    )
    table.add_column("threat model: adversary (canary)")
    exact = any(attack.evidence.closed_form is not None for attack in report.attacks)
    if exact:
        table.add_column("closed\nform\n(proven)", justify="right")
    for bound in report.attacks[0].bounds if report.attacks else ():
        mark = "†" if bound.confidence is None else "" if bound.may_refute == "any claim" else "*"
        table.add_column(bound.method.replace("-", "\n") + mark, justify="right")
    rate = next((r for a in report.attacks for r in a.true_positive_rates), None)
    if rate is not None:
        table.add_column(f"TPR at\n{100 * rate:g} % FPR", justify="right")
    threats = dict.fromkeys(attack.evidence.threat_model for attack in report.attacks)
    for threat in threats:
        table.add_row(f"[italic]{threat.value}[/italic]")
        for attack in report.attacks:
            if attack.evidence.threat_model is not threat:
                continue
            rates = attack.true_positive_rates
            table.add_row(
                f"  {attack.label}",
                *([_closed_form(attack)] if exact else []),
                *(f"{bound.epsilon:.2f}" for bound in attack.bounds),
                *([] if rate is None else [f"{100 * rates[rate].true_positive_rate:.1f} %"]),
            )
    return table


def _closed_form(attack: Attack) -> str:
    value = attack.evidence.closed_form
    return "" if value is None else f"{value:.2f}"


def show_checks(reports: list[CheckReport], console: Console | None = None) -> None:
    """One table per report: what was measured, what is allowed, whether it holds."""
    out = console or Console()
    for report in reports:
        table = Table(
            title=f"{report.unit} ({report.seconds:.1f} s): {_one_line(report.setting)}",
            title_justify="left",
            box=SIMPLE_HEAD,
            pad_edge=False,
        )
        for column in ("check", "measured", "allowed", ""):
            table.add_column(column)
        for check in report.checks:
            word = "[green]holds[/green]" if check.passed else f"[red]fails[/red]: {check.detail}"
            table.add_row(check.name, f"{check.measured:.7g}", f"{check.allowed:.7g}", word)
        out.print(table)


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


def _printed(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"
