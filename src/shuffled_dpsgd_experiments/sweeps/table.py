"""The table of a sweep, from its results alone: mean ± standard deviation over seeds."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shuffled_dpsgd_experiments.sweeps.grid import Sweep

Record = Mapping[str, Any]
TEXT_METRICS = {
    "bleu": "BLEU",
    "meteor": "METEOR 1.5",
    "meteor_exact_stem": "METEOR (exact, stem)",
    "rouge_l": "ROUGE-L",
    "nist": "NIST",
}


@dataclass(frozen=True, kw_only=True)
class SweepRow:
    """All seeds of one method at one budget; `texts` are the means of generation's metrics."""

    method: str
    epsilon: float | None
    score_name: str
    scores: tuple[float, ...]
    certified: float | None
    paper: float | None
    texts: Mapping[str, float] = field(default_factory=dict)

    @property
    def mean(self) -> float:
        return statistics.fmean(self.scores)

    @property
    def spread(self) -> float | None:
        """Standard deviation over seeds; None for a single one."""
        return statistics.stdev(self.scores) if len(self.scores) > 1 else None

    def describe(self) -> str:
        """Score, spread and number of seeds; shares in percent."""
        scale, digits = (100.0, 1) if self.score_name == "accuracy" else (1.0, 2)
        text = f"{scale * self.mean:.{digits}f}"
        if self.spread is not None:
            text += f" ± {scale * self.spread:.{digits}f}"
        return f"{text} (n = {len(self.scores)})"

    def to_json(self) -> dict[str, Any]:
        """Plain data; each ε with its kind."""
        return {
            "method": self.method,
            "epsilon": self.epsilon,
            "score_name": self.score_name,
            "mean": self.mean,
            "standard_deviation": self.spread,
            "seeds": len(self.scores),
            **({"texts": dict(self.texts)} if self.texts else {}),
            "certified_epsilon": {"value": self.certified, "kind": "proven"},
            "paper_epsilon": {"value": self.paper, "kind": "heuristic"},
        }

    def describe_budget(self) -> str:
        """The ε asked for; a dash where none was."""
        return "–" if self.epsilon is None else f"{self.epsilon:g}"

    def describe_texts(self, metrics: Iterable[str]) -> str:
        """A cell of a table for each metric of generated texts; a dash where one is missing."""
        return "".join(
            f" {self.texts[name]:.3g} |" if name in self.texts else " – |" for name in metrics
        )

    def describe_certified(self) -> str:
        """What is proven of the runs."""
        return "none" if self.certified is None else three_digits(self.certified)

    def describe_paper(self) -> str:
        """What the paper's theorem claims of them."""
        return "–" if self.paper is None else three_digits(self.paper)


def three_digits(value: float) -> str:
    """Rounded to three digits, without an exponent.

    >>> three_digits(0.0123456), three_digits(1146.2)
    ('0.0123', '1150')
    """
    return f"{value:.3g}" if abs(value) < 1000 else f"{float(f'{value:.3g}'):.0f}"


def read_records(directory: Path, stage: str = "main") -> list[dict[str, Any]]:
    """Every result of a stage in a folder, in the order of their names."""
    paths = sorted(directory.glob(f"{stage}_*.json"))
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths]


def rows_of(records: Iterable[Record]) -> list[SweepRow]:
    """Seeds of one method and budget together; runs without a finite score are left out."""
    groups: dict[tuple[str, float | None], list[Record]] = {}
    for record in records:
        groups.setdefault((record["method"], record["epsilon"]), []).append(record)
    found = []
    for (method, epsilon), group in groups.items():
        scores = tuple(float(r["score"]) for r in group if r["score"] is not None)
        if scores:
            found.append(
                SweepRow(
                    method=method,
                    epsilon=epsilon,
                    score_name=group[0]["score_name"],
                    scores=scores,
                    certified=_largest(group, "certified"),
                    paper=_largest(group, "paper"),
                    texts=_mean_texts(group),
                )
            )
    return found


def _mean_texts(group: list[Record]) -> dict[str, float]:
    """Every metric of generated texts that all seeds have."""
    found = [record["generation"] for record in group if "generation" in record]
    if len(found) < len(group):
        return {}
    return {
        metric: statistics.fmean(one[metric] for one in found)
        for metric in TEXT_METRICS
        if all(metric in one for one in found)
    }


def table_of(sweep: Sweep) -> str:
    """Markdown: a row for every method and budget that has results, and what tuning tried."""
    lines = [f"# {sweep.title}", "", *grid_lines(sweep), *_tuning_lines(sweep)]
    return "\n".join(lines) + "\n"


def ordered_rows(sweep: Sweep) -> list[SweepRow]:
    """By budget, none first, then in the order of the sweep's file."""
    order = [method.name for method in sweep.methods]
    rows = rows_of(read_records(sweep.results))
    return sorted(rows, key=lambda row: (row.epsilon or 0.0, order.index(row.method)))


def grid_lines(sweep: Sweep) -> list[str]:
    """The table itself."""
    rows = ordered_rows(sweep)
    score = rows[0].score_name if rows else "score"
    metrics = [name for name in TEXT_METRICS if any(name in row.texts for row in rows)]
    heads = "".join(f" {TEXT_METRICS[name]} |" for name in metrics)
    lines = [
        f"| ε asked for | method | {score} |{heads} certified ε (proven) | paper's ε (heuristic) |",
        "|---" * (5 + len(metrics)) + "|",
    ]
    for row in rows:
        lines.append(
            f"| {row.describe_budget()} | {row.method} | {row.describe()} |"
            f"{row.describe_texts(metrics)} {row.describe_certified()} | {row.describe_paper()} |"
        )
    return lines


def _tuning_lines(sweep: Sweep) -> list[str]:
    trials = read_records(sweep.results, "tuning")
    if not trials:
        return []
    lines = [
        "",
        "What tuning tried, on training records held back; no ε above covers it:",
        "",
        "| method | tried | score |",
        "|---|---|---|",
    ]
    for record in trials:
        tried = ", ".join(f"{key.split('.')[-1]} {v:g}" for key, v in record["tuned"].items())
        score = "none" if record["score"] is None else f"{record['score']:.4g}"
        lines.append(f"| {record['method']} | {tried} | {score} |")
    return lines


def _largest(group: Iterable[Record], claim: str) -> float | None:
    """The weakest claim of a group; seeds share their plan, so there is only one."""
    found = [r[claim]["epsilon"] for r in group if r[claim] is not None]
    return max((e for e in found if e is not None), default=None)
