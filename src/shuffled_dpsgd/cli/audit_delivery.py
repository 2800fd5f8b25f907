"""What comes before and after an audit: a canary read, a progress bar, files written, the exit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from shuffled_dpsgd.cli.output import json_text, print_json
from shuffled_dpsgd.errors import InvalidArgumentError

if TYPE_CHECKING:
    from shuffled_dpsgd.auditing.canaries import AxisCanary
    from shuffled_dpsgd.auditing.verdict import AuditReport


@contextmanager
def progress(*, quiet: bool) -> Iterator[Callable[[int, int], object] | None]:
    """A bar over (done, total) on standard error, from the first call on, or nothing at all."""
    if quiet:
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    bar = Progress(console=Console(stderr=True), transient=True)
    task = bar.add_task("auditing", total=None)

    def show(done: int, total: int) -> None:
        bar.start()
        bar.update(task, completed=done, total=total)

    try:
        yield show
    finally:
        if bar.live.is_started:
            bar.stop()


def read_canary(path: Path) -> AxisCanary:
    """A direction from a .npy file, normalised."""
    import numpy as np

    from shuffled_dpsgd.auditing.canaries import given

    try:
        vector = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise InvalidArgumentError(
            "--canary", expected="a .npy file with one row of numbers", got=str(path)
        ) from error
    return given(vector)


def deliver(report: AuditReport, output: Path | None, as_json: bool) -> None:
    """Print, write, and exit with status 1 if a proven claim was refuted."""
    from shuffled_dpsgd.cli.audit_tables import show_report

    if output is not None:
        from shuffled_dpsgd.auditing.plots import save

        write_json(report.to_json(), output)
        save(report, output / "curves")
        if report.card is not None:
            (output / "card.txt").write_text(f"{report.card}\n", encoding="utf-8")
    if as_json:
        print_json(report.to_json())
    else:
        show_report(report)
    if report.refutes_a_proven_claim:
        typer.secho("a proven claim is refuted: please report this as a bug", fg="red", err=True)
        raise typer.Exit(1)


def write_json(value: Mapping[str, object], folder: Path) -> None:
    """`report.json` in `folder`: what `--json` prints, and what produced it."""
    from shuffled_dpsgd.environment import environment

    folder.mkdir(parents=True, exist_ok=True)
    text = json_text({**value, "environment": environment()})
    (folder / "report.json").write_text(text, encoding="utf-8")
