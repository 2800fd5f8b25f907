"""How an audit is shown to people: claims first, then adversaries × estimators, then verdicts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from shuffled_dpsgd.auditing.checks import CheckReport
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
