"""How `calibrate` and `account` lay out a comparison: one row a method, its kind always shown."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from shuffled_dpsgd.accounting import Accountant

KIND_STYLE = {"proven": "green", "heuristic": "yellow", "measured": "cyan"}


def price_each(
    accountants: Sequence[Accountant], row: Callable[[Accountant], dict[str, Any]], quiet: bool
) -> dict[str, dict[str, Any]]:
    """One JSON object per accountant, with a progress bar on stderr.

    The certified accountant must answer; another that refuses keeps its row, with its reason.
    """
    from rich.console import Console
    from rich.progress import track

    from shuffled_dpsgd.errors import ShuffledDPError

    rows: dict[str, dict[str, Any]] = {}
    console = Console(stderr=True)
    silent = quiet or not console.is_terminal
    for each in track(accountants, "pricing", console=console, transient=True, disable=silent):
        try:
            rows[each.name] = row(each)
        except ShuffledDPError as error:
            if each.name == "certified":
                raise
            rows[each.name] = {
                "epsilon": None,
                "noise_multiplier": None,
                "kind": each.kind,
                "refusal": str(error),
            }
    return rows


def print_comparison(title: str, rows: Mapping[str, Mapping[str, Any]]) -> None:
    """The table for people."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    table.add_column("method", no_wrap=True)
    table.add_column("kind")
    table.add_column("ε", justify="right")
    table.add_column("noise multiplier", justify="right")
    table.add_column("remark")
    for name, row in rows.items():
        style = KIND_STYLE[row["kind"]]
        table.add_row(
            name.replace("_", " "),
            f"[{style}]{row['kind']}[/{style}]",
            number(row["epsilon"]),
            number(row["noise_multiplier"]),
            remark(name, row),
        )
    console = Console()
    console.print(table)
    for line in notes(rows):
        console.print(line, highlight=False)


def number(value: float | None) -> str:
    """Four digits, a sign for infinity, a dash for nothing."""
    if value is None:
        return "–"
    if math.isinf(value):
        return "∞"
    return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.3e}"


def remark(name: str, row: Mapping[str, Any]) -> str:
    """What a reader must know about this row, in a few words."""
    if "refusal" in row:
        return "refused"
    if name == "paper" and row["epsilon"] == 0.0:
        return "cannot be: noise never gives ε = 0"
    return {
        "certified": "rely on this",
        "gdp": "no bound of ε",
        "paper": "estimate",
    }.get(name, "")


def notes(rows: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Lines under the table: why a method refused, and what the paper's estimate rests on."""
    lines = [f"{name}: {row['refusal']}" for name, row in rows.items() if "refusal" in row]
    paper = rows.get("paper", {})
    if paper.get("step_epsilon") is not None:
        inputs = paper["inputs"]
        lines.append(
            f"paper (heuristic, no guarantee): d = {inputs['dimension']:,}, "
            f"c'/c = {inputs['batch_clip']:g}, share of δ for composition "
            f"{inputs['delta_split']:.3g}; one step before sampling is said to be "
            f"({number(paper['step_epsilon'])}, {number(paper['step_delta'])}); unshuffled "
            f"coordinates need σ0 = {number(paper['unshuffled_noise_multiplier'])}"
            + ("; falls back to σ0" if paper["falls_back"] else "")
        )
    return lines
