"""Renders the numbers of `benchmarks.step` as a page with tables and a plot.

    python -m benchmarks.report benchmarks/reports/NAME.json
    python -m benchmarks.report a.json b.json --output benchmarks/reports/NAME.json

writes NAME.md and NAME.svg, and the merged numbers as NAME.json. Every number comes from the JSON
files; so do the notes. All ratios are of one run: where several runs have the same pair, the one
with most rounds counts, of those the latest.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.adapters import ADAPTERS
from benchmarks.results import Document, load, merge, save
from benchmarks.table import Table, busy_milliseconds, host_milliseconds, milliseconds
from benchmarks.workloads import SUITES, workload
from shuffled_dpsgd.reports.style import INK, house_style, save_drawing

EAGER_TARGET, COMPILED_TARGET, MEMORY_TARGET = 0.85, 0.90, 1.3
# On a CPU: never slower than Opacus ghost, and so much of plain.
CPU_TARGET, CPU_OF_PLAIN = 1.0, 0.75
MISSING = "–"


def shown(value: float | None, form: str = "{:.2f}") -> str:
    return MISSING if value is None else form.format(value)


def ranged(ratios: Sequence[float]) -> str:
    """Median and range."""
    if not ratios:
        return MISSING
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f})"


def judged(ratios: Sequence[float], target: float) -> str:
    """Median and range, and whether the median misses the target."""
    missed = bool(ratios) and statistics.median(ratios) < target
    return ranged(ratios) + (" missed" if missed else "")


def rows(*cells: Sequence[str]) -> list[str]:
    """A table whose first row is its head."""
    lines = ["| " + " | ".join(row) + " |" for row in cells]
    return [lines[0], "|" + "---|" * len(cells[0]), *lines[1:]]


def target_lines(table: Table) -> list[str]:
    """The stated targets of a GPU beside what was measured."""
    head = (
        "workload",
        f"ours of plain, eager (at least {EAGER_TARGET})",
        f"ours of plain, compiled (at least {COMPILED_TARGET})",
        f"memory of plain, eager (at most {MEMORY_TARGET})",
        f"memory of plain, compiled (at most {MEMORY_TARGET})",
        "times Opacus ghost, eager",
        "whole private training step of plain, eager",
    )
    body = []
    for name in (name for name in SUITES["headline"] if name in table.workloads):
        memories = (
            table.memory(table.compared(name, "ours", "plain"), "plain"),
            table.memory(table.compared(name, "ours:compiled", "plain:compiled"), "plain:compiled"),
        )
        body.append(
            (
                name,
                judged(table.ratios(name, "ours", "plain"), EAGER_TARGET),
                judged(table.ratios(name, "ours:compiled", "plain:compiled"), COMPILED_TARGET),
                *(shown(m) + (" missed" if m and m > MEMORY_TARGET else "") for m in memories),
                ranged(table.ratios(name, "ours", "opacus:ghost")),
                ranged(table.ratios(name, "training", "plain")),
            )
        )
    return rows(head, *body)


def cpu_lines(table: Table) -> list[str]:
    """The stated target of a CPU beside what was measured, and what plain training reaches.

    A private step does all that a plain one does, so plain's multiple is about the most to be had.
    """
    head = (
        "workload", f"times Opacus ghost (at least {CPU_TARGET:.0f})",
        "plain, times Opacus ghost", f"ours of plain (at least {CPU_OF_PLAIN})",
        "ours of plain, by the time of the cores",
    )  # fmt: skip
    body = [
        (
            name,
            judged(table.ratios(name, "ours", "opacus:ghost"), CPU_TARGET),
            ranged(table.ratios(name, "plain", "opacus:ghost")),
            judged(table.ratios(name, "ours", "plain"), CPU_OF_PLAIN),
            judged(table.core_ratios(name, "ours", "plain"), CPU_OF_PLAIN),
        )
        for name in SUITES["cpu"]
        if name in table.workloads
    ]
    return rows(head, *body)


def scaling_lines(table: Table) -> list[str]:
    """Throughput over length and batch, ours beside plain of the same run."""
    head = (
        "length", "batch", "plain samples/s", "ours samples/s", "ours of plain",
        "memory of plain", "host ms, plain", "host ms, ours",
    )  # fmt: skip
    found = [name for name in SUITES["scaling"] if table.compared(name, "ours", "plain")]
    body = []
    for case in sorted(map(workload, found), key=lambda w: (w.length, w.batch_size)):
        ours = table.compared(case.name, "ours", "plain")
        assert ours is not None
        plain = next(e for e in table.of(case.name, "plain") if e["run"] == ours["run"])
        speeds = [1e3 * case.batch_size / (milliseconds(entry) or 0.0) for entry in (plain, ours)]
        body.append(
            (
                str(case.length),
                str(case.batch_size),
                *(f"{speed:.1f}" for speed in speeds),
                judged(table.ratios(case.name, "ours", "plain"), EAGER_TARGET),
                shown(table.memory(ours, "plain")),
                *(shown(host_milliseconds(entry), "{:.1f}") for entry in (plain, ours)),
            )
        )
    return rows(head, *body)


def detail_lines(table: Table, runs: Sequence[str]) -> list[str]:
    """One row per measurement, its ratios taken within its run."""
    head = (
        "workload", "adapter", "run", "rounds × steps", "samples/s", "ms a step", "GPU ms a step",
        "host ms a step",
        "of plain eager", "of plain compiled", "of Opacus ghost", "peak GiB", "memory of plain",
        "prepared in s",
    )  # fmt: skip
    body = []
    for name in table.workloads:
        for entry in (e for adapter in ADAPTERS for e in table.of(name, adapter)):
            named = (name, entry["adapter"], str(1 + runs.index(entry["run"])))
            if entry["error"]:
                said = entry["error"].replace("|", "\\|")
                body.append((*named, f"failed: {said}", *[""] * (len(head) - 4)))
                continue
            step = milliseconds(entry)
            assert step is not None
            ratios = [
                ranged(entry["round_ratios"].get(baseline, ())) if entry["adapter"] != baseline
                else MISSING
                for baseline in ("plain", "plain:compiled", "opacus:ghost")
            ]  # fmt: skip
            body.append(
                (
                    *named,
                    f"{len(entry['block_seconds'])} × {entry['steps']}",
                    f"{1e3 * entry['batch_size'] / step:.1f}",
                    f"{step:.2f}",
                    shown(busy_milliseconds(entry)),
                    shown(host_milliseconds(entry)),
                    *ratios,
                    shown(entry["peak_gib"]),
                    shown(table.memory(entry, "plain")),
                    f"{entry['preparation_seconds']:.0f}",
                )
            )
    return rows(head, *body)


def environment_lines(document: Document) -> list[str]:
    """What each run ran on; runs on the same ground share a line."""
    grounds: dict[str, list[str]] = {}
    for number, facts in enumerate(document["runs"].values(), start=1):
        versions = ", ".join(f"{name} {v}" for name, v in facts["versions"].items() if v)
        autocast = "bfloat16 autocast" if facts["bfloat16_autocast"] else "float32"
        if facts.get("float32_matmul_precision", "highest") != "highest":
            autocast += " with TF32 allowed"
        ground = (
            f"{facts['hardware']}, {facts['cpu_cores']} CPU cores, {facts['torch_threads']} "
            f"threads, {facts['date']}: {autocast}, AdamW, Python {facts['python']}, {versions}."
        )
        grounds.setdefault(ground, []).append(str(number))
    if len(grounds) == 1:
        return list(grounds)
    return [f"- Run {', '.join(numbers)}: {ground}" for ground, numbers in grounds.items()]


@house_style()
def plot(table: Table, path: Path) -> None:
    """Throughput as shares of plain eager, and memory where it was measured."""
    from matplotlib.figure import Figure

    scaled = set(SUITES["scaling"]) - set(SUITES["headline"])
    names = [n for n in table.workloads if n not in scaled] or table.workloads
    adapters = [a for a in ADAPTERS if any(table.of(n, a) for n in names)]
    figure = Figure(figsize=(11, 8), layout="constrained")
    axes = figure.subplots(2, 1)
    width = 0.8 / len(adapters)
    for place, adapter in enumerate(adapters):
        at = [index + width * place for index in range(len(names))]
        ratios = [table.ratios(n, adapter, "plain") or [0.0] for n in names]
        medians = [statistics.median(found) for found in ratios]
        below = [median - min(found) for median, found in zip(medians, ratios, strict=True)]
        above = [max(found) - median for median, found in zip(medians, ratios, strict=True)]
        axes[0].bar(at, medians, width, label=adapter, yerr=(below, above), capsize=2)
        found_peaks = [[e["peak_gib"] or 0.0 for e in table.of(n, adapter)] for n in names]
        axes[1].bar(at, [max(peaks, default=0.0) for peaks in found_peaks], width)
    axes[0].axhline(1.0, color=INK, linewidth=0.8)
    axes[0].set_ylabel("throughput, share of plain eager")
    axes[1].set_ylabel("peak memory, GiB")
    for axis in axes:
        axis.set_xticks([i + 0.4 - width / 2 for i in range(len(names))], names)
    axes[0].legend(ncols=5)
    save_drawing(figure, path)


def page(document: Document, plot_name: str) -> str:
    table, runs = Table(document["measurements"]), list(document["runs"])
    facts = document["runs"][runs[-1]]
    lines = [
        f"# One training step, {facts['date']}, {facts['hardware']}",
        "",
        *environment_lines(document),
        "",
        "All adapters of a run are prepared first and then take turns, one block of steps each in "
        "every round. A ratio is of throughput within one round; given are the median of the "
        "rounds and their range. Milliseconds are medians too. GPU ms is how long the device is "
        "busy with one step. Host ms is the time until one step returns when the device has "
        "nothing else to do. Rows of one run and workload were timed "
        "together; no ratio is between runs. See [the benchmark's page](../README.md) "
        "for what is timed.",
        "",
        f"![throughput and memory]({plot_name})",
    ]
    if any(name in table.workloads for name in SUITES["headline"]):
        lines += ["", "## Targets", "", *target_lines(table)]
    if any(name in table.workloads for name in SUITES["cpu"]):
        lines += ["", "## Targets on a CPU", "", *cpu_lines(table)]
    if any(n in table.workloads for n in SUITES["scaling"] if n not in SUITES["headline"]):
        lines += ["", "## Length and batch", "", *scaling_lines(table)]
    if document["notes"]:
        lines += ["", "## Notes", "", *(f"- {note}" for note in document["notes"])]
    return "\n".join([*lines, "", "## Everything measured", "", *detail_lines(table, runs), ""])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE.json")
    parser.add_argument("--output", type=Path, metavar="NAME.json", help="default: the one file")
    options = parser.parse_args()
    if options.output is None and len(options.files) > 1:
        parser.error("several files: expected --output NAME.json")
    output = options.output or options.files[0]
    document = merge(load(path) for path in options.files)
    if not document["measurements"]:
        raise SystemExit(f"{', '.join(map(str, options.files))}: no measurements")
    if options.output is not None:
        save(output, document)
    output.with_suffix(".md").write_text(page(document, f"{output.stem}.svg"))
    plot(Table(document["measurements"]), output.with_suffix(".svg"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
