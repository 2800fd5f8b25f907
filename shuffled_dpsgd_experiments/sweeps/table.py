"""The table of a sweep, from its results alone: mean ± standard deviation over seeds."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from shuffled_dpsgd_experiments.sweeps.grid import Sweep, describe_values, identity_of
from shuffled_dpsgd_experiments.sweeps.running import KnownCells
from shuffled_dpsgd_experiments.sweeps.store import read_records

Record = Mapping[str, Any]
TEXT_METRICS = {
    "bleu": "BLEU",
    "meteor": "METEOR 1.5",
    "meteor_exact_stem": "METEOR (exact, stem)",
    "meteor_nltk": "METEOR (nltk: exact, stem)",
    "rouge_l": "ROUGE-L",
    "nist": "NIST",
    "nist_nltk": "NIST (nltk)",
}


@dataclass(frozen=True, kw_only=True)
class SweepRow:
    """All seeds of one method at one budget; `texts` are the means of generation's metrics.

    `variant` says what tells it from other rows of the same method and budget, where there are any.
    Runs `without_score` diverged: they are counted, for no mean can have them.
    """

    method: str
    epsilon: float | None
    score_name: str
    scores: tuple[float, ...]
    certified: float | None
    paper: float | None
    texts: Mapping[str, float] = field(default_factory=dict)
    variant: str = ""
    without_score: int = 0
    privacy: Mapping[str, Any] = field(default_factory=dict)

    @property
    def mean(self) -> float:
        """Over the seeds that have a score; not a number if none has."""
        return statistics.fmean(self.scores) if self.scores else math.nan

    @property
    def name(self) -> str:
        """The method, and what is particular about this row of it."""
        return f"{self.method} ({self.variant})" if self.variant else self.method

    @property
    def spread(self) -> float | None:
        """Standard deviation over seeds; None for a single one."""
        return statistics.stdev(self.scores) if len(self.scores) > 1 else None

    def describe(self) -> str:
        """Score, spread and number of seeds; shares in percent."""
        lost = f"{self.without_score} without a finite score"
        if not self.scores:
            return f"none ({lost})"
        lost = f", {lost}" if self.without_score else ""
        return f"{self.describe_score()} (n = {len(self.scores)}{lost})"

    def describe_score(self) -> str:
        """Mean and spread over seeds."""
        text = in_units(self.score_name, self.mean)
        spread = self.spread
        return text if spread is None else f"{text} ± {in_units(self.score_name, spread)}"

    def to_json(self) -> dict[str, Any]:
        """Plain data; each ε with its kind."""
        return {
            "method": self.method,
            **({"variant": self.variant} if self.variant else {}),
            "epsilon": self.epsilon,
            "score_name": self.score_name,
            "mean": self.mean if self.scores else None,
            "standard_deviation": self.spread,
            "seeds": len(self.scores),
            "seeds_without_score": self.without_score,
            **({"texts": dict(self.texts)} if self.texts else {}),
            "certified_epsilon": {"value": self.certified, "kind": "proven"},
            "paper_epsilon": {"value": self.paper, "kind": "heuristic"},
        }

    def describe_certified(self) -> str:
        """What is proven of the runs."""
        return "none" if self.certified is None else three_digits(self.certified)

    def cells(self, metrics: Iterable[str]) -> list[str]:
        """A line of the table: texts have a dash where a metric is missing."""
        texts = [f"{self.texts[m]:.3g}" if m in self.texts else "–" for m in metrics]
        paper = "–" if self.paper is None else three_digits(self.paper)
        budget = "–" if self.epsilon is None else f"{self.epsilon:g}"
        return [budget, self.name, self.describe(), *texts, self.describe_certified(), paper]


def in_units(score_name: str, value: float, sign: str = "") -> str:
    """A score as tables have it: accuracies in percent.

    >>> in_units("accuracy", 0.1234), in_units("perplexity", 0.1234, "+")
    ('12.3', '+0.12')
    """
    if score_name == "accuracy":
        return f"{100 * value:{sign}.1f}"
    return f"{value:{sign}.2f}"


def three_digits(value: float) -> str:
    """Rounded to three digits, without an exponent.

    >>> three_digits(0.0123456), three_digits(1146.2)
    ('0.0123', '1150')
    """
    return f"{value:.3g}" if abs(value) < 1000 else f"{float(f'{value:.3g}'):.0f}"


def rows_of(records: Iterable[Record]) -> list[SweepRow]:
    """Seeds of one method, budget and configuration together.

    Results of other settings are never averaged: where a method has several, as after a change of
    its file, each is a row that says what differs.
    """
    groups: dict[tuple[str, float | None], dict[str, list[Record]]] = {}
    for record in records:
        alike = groups.setdefault((record["method"], record["epsilon"]), {})
        settings = json.dumps(identity_of(record.get("config", {})), sort_keys=True)
        alike.setdefault(settings, []).append(record)
    return [
        _row(method, epsilon, group, variant)
        for (method, epsilon), alike in groups.items()
        for group, variant in zip(alike.values(), _variants(alike), strict=True)
    ]


def _row(method: str, epsilon: float | None, group: list[Record], variant: str) -> SweepRow:
    return SweepRow(
        method=method,
        variant=variant,
        epsilon=epsilon,
        score_name=group[0]["score_name"],
        scores=tuple(float(r["score"]) for r in group if r["score"] is not None),
        without_score=sum(record["score"] is None for record in group),
        certified=_largest(group, "certified"),
        paper=_largest(group, "paper"),
        texts=_mean_texts(group),
        privacy=group[0].get("config", {}).get("privacy", {}),
    )


def _variants(settings: Iterable[str]) -> list[str]:
    """Of several configurations, what each has that they do not all share."""
    found = [
        {
            f"{section}.{key}".rstrip("."): value
            for section, values in json.loads(each).items()
            for key, value in (values if isinstance(values, dict) else {"": values}).items()
        }
        for each in settings
    ]
    keys = sorted({key for each in found for key in each})
    differ = [key for key in keys if len({json.dumps(each.get(key)) for each in found}) > 1]
    return [
        ", ".join(describe_values({key: each.get(key, "default") for key in differ}))
        for each in found
    ]


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
    rows = ordered_rows(sweep)
    score = rows[0].score_name if rows else "score"
    metrics = [name for name in TEXT_METRICS if any(name in row.texts for row in rows)]
    texts = [TEXT_METRICS[name] for name in metrics]
    heads = [
        "ε asked for",
        "method",
        score,
        *texts,
        "certified ε (proven)",
        "paper's ε (heuristic)",
    ]
    lines = [f"# {sweep.title}", "", line_of(heads), "|---" * len(heads) + "|"]
    lines += [line_of(row.cells(metrics)) for row in rows]
    return "\n".join([*lines, *_strangers(sweep), *_tuning_lines(sweep)]) + "\n"


def line_of(cells: Iterable[str]) -> str:
    """A line of a table in Markdown."""
    return f"| {' | '.join(cells)} |"


def ordered_rows(sweep: Sweep) -> list[SweepRow]:
    """By budget, none first, then in the order of the sweep's file."""
    order = [method.name for method in sweep.methods]
    rows = rows_of(read_records(sweep.results))
    places = {name: place for place, name in enumerate(order)}
    return sorted(rows, key=lambda row: (row.epsilon or 0.0, places.get(row.method, len(order))))


def _strangers(sweep: Sweep) -> list[str]:
    """A note if the folder has results of other settings than the file's, which are shown too."""
    cells = [cell for cell, _ in KnownCells(sweep).read()]
    known = {name for cell in cells for name in (cell.file_name, cell.older_name)}
    there = [path.name for path in sweep.results.glob("main_*.json")]
    strange = sum(name not in known for name in there)
    note = (
        f"{strange} of {len(there)} results are no cells of this file as it stands: they have "
        "other settings, or the folders of model or data have other names."
    )
    return ["", note] if strange else []


def _tuning_lines(sweep: Sweep) -> list[str]:
    trials = read_records(sweep.results, "tuning")
    lines = [
        "",
        "What tuning tried, on training records held back; no ε above covers it:",
        "",
        "| method | tried | score |",
        "|---|---|---|",
    ]
    for record in trials:
        score = "none" if record["score"] is None else f"{record['score']:.4g}"
        lines.append(
            line_of([record["method"], ", ".join(describe_values(record["tuned"])), score])
        )
    return lines if trials else []


def _largest(group: Iterable[Record], claim: str) -> float | None:
    """The weakest claim of a group; seeds share their plan, so there is only one."""
    found = [r[claim]["epsilon"] for r in group if r[claim] is not None]
    return max((e for e in found if e is not None), default=None)
