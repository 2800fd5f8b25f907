"""The record of each step in `metrics.jsonl`, one JSON object per line.

Loss, gradient norms, clipped share and signal-to-noise are computed from the private training data
without noise. No ε covers publishing them, and every page that shows them says so.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self

from shuffled_dpsgd.errors import CheckpointError

NORM_BINS_PER_DECADE = 10
NORM_DECADES = (-4, 4)
NUM_NORM_BINS = (NORM_DECADES[1] - NORM_DECADES[0]) * NORM_BINS_PER_DECADE


def norm_bin_edges() -> list[float]:
    """Edges of the logarithmic bins gradient norms are counted in.

    >>> edges = norm_bin_edges()
    >>> len(edges), edges[0], edges[-1]
    (81, 0.0001, 10000.0)
    """
    low = NORM_DECADES[0] * NORM_BINS_PER_DECADE
    return [10.0 ** ((low + i) / NORM_BINS_PER_DECADE) for i in range(NUM_NORM_BINS + 1)]


def count_norms(norms: Iterable[float]) -> dict[int, int]:
    """Count norms per logarithmic bin; what lies outside (zero, non-finite) goes to an end bin.

    >>> count_norms([1.0, 1.1, 0.0, float("inf")])
    {40: 2, 0: 1, 79: 1}
    """
    counts: Counter[int] = Counter()
    for norm in norms:
        place = NUM_NORM_BINS if norm > 0 or math.isnan(norm) else 0
        if 0 < norm < math.inf:
            place = int((math.log10(norm) - NORM_DECADES[0]) * NORM_BINS_PER_DECADE)
        counts[min(max(place, 0), NUM_NORM_BINS - 1)] += 1
    return dict(counts)


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One optimizer step. `None` means not measured at this step.

    `certified_epsilon` is spent up to and including this step; the plan's ε is what may be claimed.
    `paper_epsilon` is the paper's estimate (heuristic) for the same steps. `heldout_baseline` is
    the score of always answering the commonest held-out class, `predicted_classes` the number of
    classes that were answered. `num_nonfinite` records had no finite gradient and contributed
    nothing.
    """

    step: int
    batch_size: int
    seconds: float
    learning_rate: float
    loss: float | None = None
    clipped_share: float | None = None
    median_norm: float | None = None
    signal_to_noise: float | None = None
    certified_epsilon: float | None = None
    paper_epsilon: float | None = None
    heldout_loss: float | None = None
    heldout_score: float | None = None
    heldout_baseline: float | None = None
    predicted_classes: int | None = None
    num_nonfinite: int | None = None
    norm_counts: Mapping[int, int] | None = None

    def to_json(self) -> dict[str, Any]:
        """As written to the file: measured fields only."""
        return {key: value for key, value in asdict(self).items() if value is not None}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """The inverse of `to_json`; unknown keys are refused."""
        unknown = set(value) - {field.name for field in fields(cls)}
        if unknown:
            raise CheckpointError(f"metrics.jsonl has unknown fields {sorted(unknown)}")
        data = dict(value)
        if "norm_counts" in data:
            data["norm_counts"] = {int(key): count for key, count in data["norm_counts"].items()}
        return cls(**data)


def samples_per_second(records: Collection[StepRecord]) -> float | None:
    """Throughput over the time of these steps; None where none was measured."""
    seconds = sum(record.seconds for record in records)
    return sum(record.batch_size for record in records) / seconds if seconds else None


class MetricsLog:
    """Appends records to `metrics.jsonl`; a resumed run drops records after its checkpoint."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, record: StepRecord) -> None:
        """Write one line and flush it."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record.to_json(), allow_nan=False) + "\n")

    def read(self) -> list[StepRecord]:
        """All complete records; a last line torn by a crash is ignored."""
        if not self.path.exists():
            return []
        *complete, _torn = self.path.read_text(encoding="utf-8").split("\n")
        return [StepRecord.from_json(json.loads(line)) for line in complete if line]

    def rewind(self, last_step: int) -> None:
        """Keep the records up to `last_step`, atomically: resumed steps are written again."""
        kept = [record for record in self.read() if record.step <= last_step]
        temporary = self.path.with_suffix(".tmp")
        lines = (json.dumps(record.to_json(), allow_nan=False) + "\n" for record in kept)
        temporary.write_text("".join(lines), encoding="utf-8")
        os.replace(temporary, self.path)
