"""Renders the numbers of `benchmarks.step` as a page with tables and a plot.

    python -m benchmarks.report benchmarks/reports/NAME.json

writes NAME.md and NAME.svg beside the JSON. Every number in them comes from the JSON; so do the
notes, a list of remarks that whoever ran the benchmark may add there.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

from benchmarks.adapters import ADAPTERS
from benchmarks.workloads import SUITES

Entry = dict[str, Any]
Table = dict[str, dict[str, Entry]]
EAGER_TARGET, COMPILED_TARGET, MEMORY_TARGET = 0.85, 0.90, 1.3


def seconds(entry: Entry) -> float:
    return statistics.median(entry["block_seconds"])


def ratio(table: Table, workload: str, adapter: str, baseline: str) -> float | None:
    """Throughput of `adapter` over that of `baseline`, where both were measured."""
    row = table[workload]
    pair = [row.get(name) for name in (adapter, baseline)]
    if any(entry is None or entry["error"] for entry in pair):
        return None
    return seconds(row[baseline]) / seconds(row[adapter])


def shown(value: float | None, form: str = "{:.2f}") -> str:
    return "–" if value is None else form.format(value)


def measured(document: dict[str, Any]) -> Table:
    table: Table = {}
    for entry in document["measurements"]:
        table.setdefault(entry["workload"], {})[entry["adapter"]] = entry
    return table


def detail_lines(table: Table) -> list[str]:
    """One row per workload and adapter."""
    lines = [
        "| workload | adapter | samples/s | ms a step | spread | of plain eager "
        "| of plain compiled | peak GiB | memory of plain |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for workload, row in table.items():
        for adapter in (name for name in ADAPTERS if name in row):
            entry = row[adapter]
            if entry["error"]:
                lines.append(f"| {workload} | {adapter} | failed: {entry['error']} |||||||")
                continue
            blocks, median = entry["block_seconds"], seconds(entry)
            plain = row.get("plain")
            memory = None
            if entry["peak_gib"] and plain is not None and plain["peak_gib"]:
                memory = entry["peak_gib"] / plain["peak_gib"]
            lines.append(
                f"| {workload} | {adapter} | {entry['samples_per_second']:.1f} "
                f"| {1e3 * median:.2f} | ±{(max(blocks) - min(blocks)) / 2 / median:.0%} "
                f"| {shown(ratio(table, workload, adapter, 'plain'))} "
                f"| {shown(ratio(table, workload, adapter, 'plain:compiled'))} "
                f"| {shown(entry['peak_gib'])} | {shown(memory)} |"
            )
    return lines


def target_lines(table: Table) -> list[str]:
    """The stated targets beside what was measured."""
    lines = [
        f"| workload | ours of plain, eager (target {EAGER_TARGET}) "
        f"| ours of plain, compiled (target {COMPILED_TARGET}) "
        f"| memory of plain, eager (target at most {MEMORY_TARGET}) | ours of Opacus ghost |",
        "|---|---|---|---|---|",
    ]
    for workload in (name for name in SUITES["headline"] if name in table):
        row = table[workload]
        eager = ratio(table, workload, "ours", "plain")
        compiled = ratio(table, workload, "ours:compiled", "plain:compiled")
        memory = None
        if eager is not None and row["plain"]["peak_gib"]:
            memory = row["ours"]["peak_gib"] / row["plain"]["peak_gib"]
        marks = [
            shown(eager) + missed(eager is not None and eager < EAGER_TARGET),
            shown(compiled) + missed(compiled is not None and compiled < COMPILED_TARGET),
            shown(memory) + missed(memory is not None and memory > MEMORY_TARGET),
            shown(ratio(table, workload, "ours", "opacus:ghost")),
        ]
        lines.append(f"| {workload} | " + " | ".join(marks) + " |")
    return lines


def missed(is_missed: bool) -> str:
    return " (missed)" if is_missed else ""


def scaling_lines(table: Table) -> list[str]:
    """Throughput over length and batch, ours beside plain."""
    lines = [
        "| workload | plain samples/s | ours samples/s | of plain | memory of plain |",
        "|---|---|---|---|---|",
    ]
    for workload in (name for name in SUITES["scaling"] if name in table):
        row = table[workload]
        if ratio(table, workload, "ours", "plain") is None:
            continue
        plain, ours = row["plain"], row["ours"]
        memory = ours["peak_gib"] / plain["peak_gib"] if plain["peak_gib"] else None
        lines.append(
            f"| {workload} | {plain['samples_per_second']:.1f} | {ours['samples_per_second']:.1f} "
            f"| {shown(ratio(table, workload, 'ours', 'plain'))} | {shown(memory)} |"
        )
    return lines


def plot(table: Table, path: Path) -> None:
    """Throughput, and memory where it was measured, as shares of plain eager."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "step"
    from matplotlib import pyplot as plt

    workloads = [n for n in table if any(a != "plain" for a in table[n])]
    workloads = [n for n in workloads if n not in SUITES["scaling"] or n in SUITES["headline"]]
    adapters = [a for a in ADAPTERS if any(a in table[n] for n in workloads)]
    figure, axes = plt.subplots(2, 1, figsize=(11, 8), layout="constrained")
    width = 0.8 / len(adapters)
    for place, adapter in enumerate(adapters):
        at = [index + width * place for index in range(len(workloads))]
        speeds = [ratio(table, n, adapter, "plain") or 0.0 for n in workloads]
        axes[0].bar(at, speeds, width, label=adapter)
        peaks = [
            table[n][adapter]["peak_gib"] or 0.0
            if adapter in table[n] and not table[n][adapter]["error"]
            else 0.0
            for n in workloads
        ]
        axes[1].bar(at, peaks, width)
    axes[0].axhline(1.0, color="black", linewidth=0.8)
    axes[0].set_ylabel("throughput, share of plain eager")
    axes[1].set_ylabel("peak memory, GiB")
    for axis in axes:
        axis.set_xticks([i + 0.4 - width / 2 for i in range(len(workloads))], workloads)
    axes[0].legend(ncols=5, fontsize="small")
    figure.savefig(path, metadata={"Date": None})


def render(path: Path) -> None:
    """Write the page and the plot of one JSON file."""
    document = json.loads(path.read_text())
    table, facts = measured(document), document["environment"]
    versions = ", ".join(f"{k} {v}" for k, v in facts["versions"].items() if v)
    autocast = "bfloat16 autocast" if facts["bfloat16_autocast"] else "float32"
    lines = [
        f"# One training step, {facts['date']}, {facts['hardware']}",
        "",
        f"{autocast}, AdamW, Python {facts['python']}, {versions}, {facts['cpu_cores']} CPU cores, "
        f"{facts['torch_threads']} threads. Each number is the median over blocks of steps; the "
        "spread is half the range of the blocks. See [the benchmark's page](../README.md) for what "
        "is timed.",
        "",
        f"![throughput and memory]({path.stem}.svg)",
    ]
    if any(name in table for name in SUITES["headline"]):
        lines += ["", "## Targets", "", *target_lines(table)]
    if any(n in table for n in SUITES["scaling"] if n not in SUITES["headline"]):
        lines += ["", "## Length and batch", "", *scaling_lines(table)]
    headline = {n: row for n, row in table.items() if n not in SUITES["scaling"] or len(row) > 2}
    if document.get("notes"):
        lines += ["", "## Notes", "", *(f"- {note}" for note in document["notes"])]
    lines += ["", "## Everything measured", "", *detail_lines(headline), ""]
    path.with_suffix(".md").write_text("\n".join(lines))
    plot(table, path.with_suffix(".svg"))


if __name__ == "__main__":
    for name in sys.argv[1:]:
        render(Path(name))
