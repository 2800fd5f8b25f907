"""How an audit is shown: claims first, then adversaries × estimators, then verdicts; and files."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console

from shuffled_dpsgd.cli.output import json_text, print_json, table

if TYPE_CHECKING:
    from rich.table import Table

    from shuffled_dpsgd.auditing.checks import CheckReport
    from shuffled_dpsgd.auditing.reach import Reach
    from shuffled_dpsgd.auditing.verdict import Attack, AuditReport


@contextmanager
def progress(*, quiet: bool) -> Iterator[Callable[[int, int], object]]:
    """A bar over (done, total) on standard error, unless `quiet` or without a terminal."""
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=quiet or not console.is_terminal) as bar:
        task = bar.add_task("auditing", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def deliver(report: AuditReport, output: Path | None, as_json: bool) -> None:
    """Print, write, and exit with status 1 if a proven claim was refuted."""
    if output is not None:
        from shuffled_dpsgd.auditing.plots import save

        save(report, output / "curves")
        if report.card is not None:
            (output / "card.txt").write_text(f"{report.card}\n", encoding="utf-8")
    hand_over(report.to_json(), output, as_json, lambda: show_report(report))
    if report.refutes_a_proven_claim:
        typer.secho("a proven claim is refuted: please report this as a bug", fg="red", err=True)
        raise typer.Exit(1)


def hand_over(
    found: Mapping[str, object], output: Path | None, as_json: bool, show: Callable[[], object]
) -> None:
    """`report.json` in the folder, with what produced it; then JSON for machines, or a table."""
    if output is not None:
        from shuffled_dpsgd.environment import environment

        output.mkdir(parents=True, exist_ok=True)
        text = json_text({**found, "command": _command(), "environment": environment()})
        (output / "report.json").write_text(text, encoding="utf-8")
    if as_json:
        print_json(found)
    else:
        show()


def _command() -> str:
    """What writes the same file again, wherever it is put."""
    words = sys.argv[1:]
    kept = [
        word
        for before, word in pairwise(["", *words])
        if not word.startswith("--output") and before != "--output" and word != "--json"
    ]
    return shlex.join(["shuffled-dpsgd", *kept])


def show_report(report: AuditReport) -> None:
    """Certified ε, the paper's estimate, audited lower bounds, verdicts: in that order."""
    out = Console()
    out.print(f"[bold]Audit of {report.unit}[/bold] ({report.seconds:.1f} s)")
    out.print("  " + _one_line(report.setting))
    for block in report.setting.get("plan", {}).get("blocks", ()):
        shown = ("dimension", "noise_multiplier", "batch_clip_norm")
        out.print(f"  block {block['name']}: {_one_line({key: block[key] for key in shown})}")
    for claim in report.claims:
        out.print(f"  claim: {claim.describe()}")
    out.print(_attack_table(report))
    for attack in report.attacks:
        for assumption in attack.evidence.assumptions:
            out.print(f"  {attack.evidence.adversary} assumes: {assumption}")
    for verdict in report.verdicts:
        colour = "red" if verdict.refuted else "green"
        out.print(
            f"  ε = {verdict.claim.epsilon:.4g} ({verdict.claim.kind}): "
            f"[{colour}]{verdict.outcome}[/{colour}], strongest joint bound "
            f"{verdict.strongest_bound:.2f} (measured) by {verdict.strongest_attack}"
        )
    if report.membership is not None:
        found = report.membership
        out.print(f"  membership of {found.num_records} records ({found.canary}), area under ROC:")
        for name, area in found.rows():
            out.print(f"    {name}: {area} (measured)")
    for note in report.notes:
        out.print(f"  note: {note}")
    if report.reach is not None:
        _show_reach(report.reach, out)


def _show_reach(reach: Reach, out: Console) -> None:
    out.print(f"  adversaries run: {', '.join(reach.ran)}")
    out.print(
        "  they would have refuted a claim about any mechanism below "
        f"ε = {reach.largest_bound:.2f} (measured) had one of them been right every time, and "
        "would have caught:"
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


def plain_table(
    title: str,
    headings: Sequence[str],
    rows: Iterable[Sequence[str]],
    words: Sequence[str] = (),
    caption: str | None = None,
) -> Table:
    """As audits are shown: no frame, everything to the left but numbers."""
    left = {"title_justify": "left", "caption_justify": "left"}
    look = {"title": title, "caption": caption, "box": SIMPLE_HEAD, "pad_edge": False}
    return table(headings, rows, words=words, **left, **look)


def _attack_table(report: AuditReport) -> Table:
    every = [bound for attack in report.attacks for bound in attack.bounds]
    level = f" at {100 * every[0].confidence:g} % each" if every else ""
    methods = {bound.method: "*" * (bound.may_refute != "any claim") for bound in every}
    exact = any(attack.evidence.closed_form is not None for attack in report.attacks)
    rate = next((r for a in report.attacks for r in a.true_positive_rates), None)
    first = "threat model: adversary (canary)"
    headings = [
        first,
        *(["closed\nform\n(proven)"] if exact else []),
        *(method.replace("-", "\n") + mark for method, mark in methods.items()),
        *([] if rate is None else [f"TPR at\n{100 * rate:g} % FPR"]),
    ]
    rows: list[Sequence[str]] = []
    for threat in dict.fromkeys(attack.evidence.threat_model for attack in report.attacks):
        rows.append([f"[italic]{threat.value}[/italic]"])
        for attack in report.attacks:
            if attack.evidence.threat_model is threat:
                rows.append([f"  {attack.label}", *_cells(attack, methods, rate, exact=exact)])
    note = "* tests the noise of Gaussian steps, not any claim"
    caption = note if "*" in methods.values() else None
    return plain_table(f"ε (measured), lower bounds{level}", headings, rows, [first], caption)


def _cells(
    attack: Attack, methods: Mapping[str, str], rate: float | None, *, exact: bool
) -> Iterator[str]:
    """What one adversary showed; empty where an estimator does not read its kind of scores."""
    if exact:
        form = attack.evidence.closed_form
        yield "" if form is None else f"{form:.2f}"
    found = {bound.method: bound.epsilon for bound in attack.bounds}
    for method in methods:
        yield f"{found[method]:.2f}" if method in found else ""
    if rate is not None:
        rates = attack.true_positive_rates
        yield f"{100 * rates[rate].true_positive_rate:.1f} %" if rates else ""


def show_checks(reports: list[CheckReport]) -> None:
    """One table per report: what was measured, what is allowed, whether it holds."""
    headings = ("check", "measured", "allowed", "")
    for report in reports:
        rows = [
            (
                check.name,
                f"{check.measured:.7g}",
                f"{check.allowed:.7g}",
                "[green]holds[/green]" if check.passed else f"[red]fails[/red]: {check.detail}",
            )
            for check in report.checks
        ]
        title = f"{report.unit} ({report.seconds:.1f} s): {_one_line(report.setting)}"
        Console().print(plain_table(title, headings, rows, headings))
