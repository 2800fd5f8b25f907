"""Prints the measurements of `benchmarks.step` as a table, for the records in README.md.

    python -m benchmarks.report benchmarks/reports/NAME.json

All ratios are of one run: a side is compared with the sides of the same rounds only.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.results import load

Entry = dict[str, Any]
HEAD = (
    "workload", "adapter", "rounds × steps", "ms a step", "GPU ms", "host ms", "core ms",
    "Python calls", "peak GiB", "throughput over",
)  # fmt: skip


def ranged(ratios: Sequence[float]) -> str:
    """Median and range."""
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def cells(entry: Entry) -> list[str]:
    """One measurement as a row; records of earlier code lack some of the figures."""
    if entry["error"]:
        return [entry["workload"], entry["adapter"], f"failed: {entry['error']}"]
    steps = entry["steps"]

    def milliseconds(key: str, per: int = 1) -> str:
        found = entry.get(key)
        if not found:
            return ""
        value = statistics.median(found) if isinstance(found, list) else found
        return f"{1e3 * value / per:.2f}"

    calls, peak = entry.get("python_calls"), entry["peak_gib"]
    return [
        entry["workload"],
        entry["adapter"],
        f"{len(entry['block_seconds'])} × {steps}",
        milliseconds("block_seconds", steps),
        milliseconds("busy_seconds"),
        milliseconds("host_seconds"),
        milliseconds("core_seconds", steps),
        "" if calls is None else f"{calls:,}",
        "" if peak is None else f"{peak:.2f}",
        "; ".join(
            f"{baseline} {ranged(ratios)}"
            for baseline, ratios in entry["round_ratios"].items()
            if baseline != entry["adapter"]
        ),
    ]


def describe(entry: Entry) -> str:
    """One measurement on one line."""
    words = [
        f"{name} {cell}" if cell and place > 1 else cell
        for place, (name, cell) in enumerate(zip(HEAD, cells(entry), strict=False))
    ]
    return "  ".join(word for word in words if word)


def table(measurements: Sequence[Entry]) -> str:
    rows = [[cell.replace("|", "/") for cell in cells(entry)] for entry in measurements]
    lines = ["| " + " | ".join(row) + " |" for row in (HEAD, *rows)]
    return "\n".join([lines[0], "|---" * len(HEAD) + "|", *lines[1:]])


def main() -> None:
    for name in sys.argv[1:]:
        document = load(Path(name))
        print(table(document["measurements"]))
        print(*(f"\n- {note}" for note in document["notes"]), sep="")


if __name__ == "__main__":
    main()
