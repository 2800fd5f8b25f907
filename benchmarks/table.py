"""Reads measurements: which of them count, and how they compare within their runs.

Where several runs have the same pair of adapters, the one with most rounds counts, of those the
latest. No ratio is ever formed between two runs.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

Entry = dict[str, Any]


class Table:
    """The measurements, by workload, and the comparisons within their runs."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self.entries = entries

    @property
    def workloads(self) -> list[str]:
        return list(dict.fromkeys(entry["workload"] for entry in self.entries))

    def of(self, workload: str, adapter: str) -> list[Entry]:
        return [e for e in self.entries if (e["workload"], e["adapter"]) == (workload, adapter)]

    def compared(self, workload: str, adapter: str, baseline: str) -> Entry | None:
        """The measurement of `adapter` beside `baseline`; of several, the one of most rounds."""
        found = [
            entry
            for entry in self.of(workload, adapter)
            if not entry["error"] and baseline in entry["round_ratios"]
        ]
        return max(found, key=lambda e: (len(e["block_seconds"]), e["run"]), default=None)

    def ratios(self, workload: str, adapter: str, baseline: str) -> list[float]:
        entry = self.compared(workload, adapter, baseline)
        return [] if entry is None else entry["round_ratios"][baseline]

    def core_ratios(self, workload: str, adapter: str, baseline: str) -> list[float]:
        """The same by the time of all cores, round by round; older measurements do not have it."""
        entry = self.compared(workload, adapter, baseline)
        others = [] if entry is None else self.of(workload, baseline)
        for other in (o for o in others if entry is not None and o["run"] == entry["run"]):
            assert entry is not None
            pairs = zip(entry.get("core_seconds", ()), other.get("core_seconds", ()), strict=False)
            return [theirs / mine for mine, theirs in pairs]
        return []

    def memory(self, entry: Entry | None, baseline: str) -> float | None:
        """Peak memory over that of `baseline` in the same run."""
        if entry is None or entry["error"] or entry["peak_gib"] is None:
            return None
        for other in self.of(entry["workload"], baseline):
            if other["run"] == entry["run"] and not other["error"]:
                return float(entry["peak_gib"] / other["peak_gib"])
        return None


def milliseconds(entry: Entry | None) -> float | None:
    """Of one step, the median of the rounds."""
    if entry is None or not entry["block_seconds"]:
        return None
    return float(1e3 * statistics.median(entry["block_seconds"]) / entry["steps"])


def busy_milliseconds(entry: Entry | None) -> float | None:
    """How long a GPU works on one step; older measurements do not have it."""
    seconds = None if entry is None else entry.get("busy_seconds")
    return None if seconds is None else float(1e3 * seconds)


def host_milliseconds(entry: Entry | None) -> float | None:
    """Until one step returns, the median of a few."""
    if entry is None or not entry["host_seconds"]:
        return None
    return float(1e3 * statistics.median(entry["host_seconds"]))
