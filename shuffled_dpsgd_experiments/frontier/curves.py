"""From cells to curves, and what they say: every point against DP-SGD at the same certified ε."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, stdev
from typing import Any

import numpy as np

from shuffled_dpsgd_experiments.exhibits import in_clips
from shuffled_dpsgd_experiments.frontier.cells import Record, point_of
from shuffled_dpsgd_experiments.frontier.running import tried_rates
from shuffled_dpsgd_experiments.frontier.workloads import OURS, Point, Workload

BAND = (10, 90)
"""Percentiles over seeds that a band reaches from and to."""
SPLIT = "test"
"""What is drawn and compared. SST-2's test set is twice its development set."""
ERRORS = 2.0
"""A difference counts when it is larger than so many standard errors."""
LEARNT = 0.25
"""A point counts from this part of the best lead of DP-SGD over guessing."""


@dataclass(frozen=True, kw_only=True)
class Score:
    """Accuracy over seeds on one held-out set, in per cent."""

    mean: float
    low: float
    high: float
    error: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Score:
        low, high = np.percentile(values, BAND)
        error = stdev(values) / math.sqrt(len(values))
        return cls(mean=fmean(values), low=float(low), high=float(high), error=error)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A point with what its runs found. Certified is proven; what the paper says is heuristic."""

    point: Point
    certified_epsilon: float
    paper_epsilon: float | None
    noise_multipliers: dict[str, float]
    learning_rate: float
    at_the_edge: bool
    tried: dict[str, float]
    num_seeds: int
    scores: dict[str, Score]


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A point of the paper's algorithm, or of the floor, less DP-SGD at the same certified ε.

    `at_the_claim` is less DP-SGD certified at the ε that is only claimed; None if that is beyond
    DP-SGD's points. `learnt` says whether the point has learnt enough to be compared.
    """

    point: Point
    difference: float
    error: float
    at_the_claim: float | None
    learnt: bool

    @property
    def verdict(self) -> str:
        """Whether the difference is beyond its error, of a point that has learnt something."""
        if not self.learnt:
            return "hardly anything learnt"
        if abs(self.difference) <= ERRORS * self.error:
            return "no difference shown"
        return "above DP-SGD" if self.difference > 0 else "below DP-SGD"


@dataclass(frozen=True, kw_only=True)
class Curves:
    """One workload."""

    workload: Workload
    measured: tuple[Measured, ...]
    commits: tuple[str, ...]
    dates: tuple[str, ...]
    floor: Curves | None = None

    def plain(self) -> list[Measured]:
        """DP-SGD with our ingredients by rising certified ε."""
        own = [e for e in self.measured if not e.point.is_paper and e.point.ingredients == OURS]
        return sorted(own, key=lambda each: each.certified_epsilon)

    def papers(self, claim: float) -> list[Measured]:
        """The paper's algorithm at one claimed ε, by rising certified ε."""
        own = [e for e in self.measured if e.point.is_paper and e.point.epsilon == claim]
        return sorted(own, key=lambda each: each.certified_epsilon)

    def comparisons(self) -> list[Difference]:
        """Every point of the paper's algorithm that DP-SGD can be compared with."""
        return self._compared([each for each in self.measured if each.point.is_paper])

    def floor_comparisons(self) -> list[Difference]:
        """The linear model less DP-SGD on this one, wherever both can be compared."""
        return [] if self.floor is None else self._compared(self.floor.plain())

    def _compared(self, measured: Sequence[Measured]) -> list[Difference]:
        found, guess = [], 100 / self.workload.num_classes
        best = max((each.scores[SPLIT].mean for each in self.plain()), default=guess)
        for each in measured:
            other = self._plain_at(each.certified_epsilon)
            if other is None:
                continue
            score, claimed = each.scores[SPLIT], self._plain_at(each.point.epsilon)
            found.append(
                Difference(
                    point=each.point,
                    difference=score.mean - other[0],
                    error=math.hypot(score.error, other[1]),
                    at_the_claim=None if claimed is None else score.mean - claimed[0],
                    learnt=score.mean - guess >= LEARNT * (best - guess),
                )
            )
        return found

    def _plain_at(self, epsilon: float) -> tuple[float, float] | None:
        """Mean and error of DP-SGD, on the line between its neighbours; None beyond all of them."""
        own = self.plain()
        places = [math.log(each.certified_epsilon) for each in own]
        at = math.log(epsilon)
        # Calibration stays below what was asked for by less than this.
        if not own or not places[0] <= at <= places[-1] + 1e-3:
            return None
        means = [each.scores[SPLIT].mean for each in own]
        errors = [each.scores[SPLIT].error for each in own]
        return float(np.interp(at, places, means)), float(np.interp(at, places, errors))

    def to_json(self) -> dict[str, Any]:
        """Every number that is drawn or said."""
        return {
            "title": self.workload.title,
            "settings": self.workload.settings(),
            "split": SPLIT,
            "points": [asdict(each) for each in self.measured],
            "comparisons": [
                asdict(each) | {"verdict": each.verdict} for each in self.comparisons()
            ],
            "commits": list(self.commits),
            "dates": list(self.dates),
            "floor": None if self.floor is None else self.floor.to_json(),
        }


def curves_of(workload: Workload, records: list[Record], floor: Curves | None = None) -> Curves:
    """The points that have a score and a spread, so at least two seeds."""
    runs: dict[Point, list[Record]] = {point: [] for point in workload.points()}
    for record in records:
        if record["stage"] == "figure":
            runs.setdefault(point_of(record), []).append(record)
    return Curves(
        workload=workload,
        measured=tuple(
            _measured(tried_rates(workload, records, point), point, found)
            for point, found in runs.items()
            if len(found) > 1
        ),
        commits=tuple(sorted({record["commit"] for record in records})),
        dates=tuple(sorted({record["date"] for record in records})),
        floor=floor,
    )


def _measured(tried: Mapping[float, float], point: Point, runs: list[Record]) -> Measured:
    first = runs[0]
    rate = first["learning_rate"]
    return Measured(
        point=point,
        # Calibration has come closer to its target since the first runs; the largest covers all.
        certified_epsilon=max(run["certified_epsilon"] for run in runs),
        paper_epsilon=first["paper_epsilon"],
        noise_multipliers=first["noise_multipliers"],
        learning_rate=rate,
        at_the_edge=rate in (min(tried), max(tried)) if tried else True,
        tried={f"{each:g}": 100 * score for each, score in tried.items()},
        num_seeds=len(runs),
        scores={
            split: Score.of([100 * run["accuracy"][split] for run in runs])
            for split in first["accuracy"]
        },
    )


def statement(curves: Sequence[Curves]) -> str:
    """What the figure shows, in sentences that follow from its numbers."""
    text = " ".join(_sentence(each) for each in curves if each.comparisons())
    return re.sub(r"(?<= )-(?=\d)", "−", text)


def _sentence(curves: Curves) -> str:
    found = curves.comparisons()
    seeds = _span(sorted({each.num_seeds for each in curves.measured}))
    title = f"{curves.workload.title} ({seeds} seeds a point)"
    learnt = [each for each in found if each.learnt]
    few = "less than a quarter of DP-SGD's best lead on guessing"
    if not learnt:
        return f"{title}: no verdict, as the paper's algorithm learnt {few} at each of its points."
    verdicts = [each.verdict for each in learnt]
    below, above = verdicts.count("below DP-SGD"), verdicts.count("above DP-SGD")
    ranges = [each.difference for each in learnt]
    most = max(each.difference + ERRORS * each.error for each in learnt)
    little = f"; {len(found) - len(learnt)} more learnt {few}" if len(learnt) < len(found) else ""
    return (
        f"{title}: {_at_the_claim(curves, learnt)}against DP-SGD at the same certified ε, {below} "
        f"of its {len(learnt)} points are below, {above} above, and {len(learnt) - below - above} "
        f"within two standard errors (differences from {min(ranges):+.1f} to {max(ranges):+.1f} "
        f"points, and to {most:+.1f} with two standard errors added){little}."
        f"{_floor_sentence(curves)}"
    )


def _at_the_claim(curves: Curves, learnt: Sequence[Difference]) -> str:
    """The most that the paper's algorithm gains on DP-SGD certified at what is only claimed."""
    gains = {each.point: each.at_the_claim for each in learnt if each.at_the_claim is not None}
    if not gains:
        return ""
    point, gain = max(gains.items(), key=lambda each: each[1])
    proven = next(each.certified_epsilon for each in curves.measured if each.point == point)
    return (
        f"at its claimed ε = {point.epsilon:g} (heuristic) the paper's algorithm with c' = "
        f"{in_clips(point.batch_clip_ratio or 0.0)} (its best on the test set itself) is "
        f"{abs(gain):.1f} points {'more' if gain > 0 else 'less'} accurate than DP-SGD certified "
        f"at that ε, and what is proven of it there is ε = {proven:.3g}; "
    )


def _floor_sentence(curves: Curves) -> str:
    """Where a linear model does as well as the one that is drawn."""
    found = curves.floor_comparisons()
    if not found:
        return ""
    ahead = [f"{each.point.epsilon:g}" for each in found if each.verdict == "above DP-SGD"]
    behind = [f"{each.point.epsilon:g}" for each in found if each.verdict == "below DP-SGD"]
    places = [
        f"{how} it at ε = {', '.join(e)}" for how, e in (("above", ahead), ("below", behind)) if e
    ]
    return f" Logistic regression by DP-SGD is {' and '.join(places) or 'not told from it'}."


def _span(numbers: Sequence[int]) -> str:
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"
