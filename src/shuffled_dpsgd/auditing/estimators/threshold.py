"""How a threshold is chosen, so that choosing it never costs the stated confidence.

Looking at all thresholds and keeping the best one is the commonest way to audit a number that is
not there. Two honest rules: choose on one part of the scores and count on the other (`HeldOut`),
or fix the thresholds before seeing any score and divide the error level among them (`Fixed`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from shuffled_dpsgd.auditing.estimators.scores import ErrorCounts, Floats, ScorePair
from shuffled_dpsgd.errors import InvalidArgumentError

Tail = Literal["upper", "lower"]
EXTREMES = 48
EVENLY_SPACED = 160


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Guess "present" when the score lies beyond `threshold` on the side `tail`."""

    threshold: float
    tail: Tail = "upper"

    def errors(self, scores: ScorePair) -> ErrorCounts:
        sign = 1.0 if self.tail == "upper" else -1.0
        return ErrorCounts(
            false_positives=int((sign * scores.out > sign * self.threshold).sum()),
            num_out=scores.num_out,
            false_negatives=int((sign * scores.present <= sign * self.threshold).sum()),
            num_present=scores.num_present,
        )


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Decisions to count on `scores`, each entitled to `1 / len(decisions)` of the error level."""

    scores: ScorePair
    decisions: tuple[Decision, ...]


Gain = Callable[[Floats, int, Floats, int], Floats]
"""Larger is better: (false positives, num_out, false negatives, num_present) -> what to maximise,
with the counts scaled to the sizes the decision will finally be judged on."""


class ThresholdRule(Protocol):
    """Turns scores into the trial an estimator may evaluate."""

    def plan(self, scores: ScorePair, gain: Gain) -> Trial: ...


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """Choose threshold and tail on the first `fraction` of the scores; count on the rest."""

    fraction: float = 0.5

    def __post_init__(self) -> None:
        if not 0.0 < self.fraction < 1.0:
            raise InvalidArgumentError(
                "fraction", expected="strictly between 0 and 1", got=self.fraction
            )

    def plan(self, scores: ScorePair, gain: Gain) -> Trial:
        chosen_on, counted_on = scores.split(self.fraction)
        return Trial(scores=counted_on, decisions=(best_decision(chosen_on, counted_on, gain),))


@dataclass(frozen=True, kw_only=True)
class Fixed:
    """Thresholds given before any score was seen; Bonferroni over them, all scores counted."""

    thresholds: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.thresholds:
            raise InvalidArgumentError("thresholds", expected="at least one", got=self.thresholds)

    def plan(self, scores: ScorePair, gain: Gain) -> Trial:
        del gain
        decisions = tuple(Decision(threshold=value) for value in self.thresholds)
        return Trial(scores=scores, decisions=decisions)


def best_decision(chosen_on: ScorePair, counted_on: ScorePair, gain: Gain) -> Decision:
    """The threshold and tail that would maximise `gain` if rates carried over exactly."""
    thresholds = candidates(chosen_on)
    fp_rate = survival(chosen_on.out, thresholds)
    fn_rate = 1.0 - survival(chosen_on.present, thresholds)
    best: tuple[float, Decision] | None = None
    tails: tuple[tuple[Tail, Floats, Floats], ...] = (
        ("upper", fp_rate, fn_rate),
        ("lower", 1.0 - fp_rate, 1.0 - fn_rate),
    )
    for tail, fp, fn in tails:
        gains = gain(
            np.round(fp * counted_on.num_out),
            counted_on.num_out,
            np.round(fn * counted_on.num_present),
            counted_on.num_present,
        )
        at = int(np.argmax(gains))
        if best is None or gains[at] > best[0]:
            best = (float(gains[at]), Decision(threshold=float(thresholds[at]), tail=tail))
    assert best is not None
    return best[1]


def survival(values: Floats, thresholds: Floats) -> Floats:
    """Share of `values` strictly above each threshold."""
    ordered = np.sort(values)
    above: Floats = 1.0 - np.searchsorted(ordered, thresholds, side="right") / ordered.size
    return above


def candidates(scores: ScorePair) -> Floats:
    """Mid-points between pooled scores: every extreme one, and an even selection in between."""
    pooled = np.unique(np.concatenate([scores.out, scores.present]))
    if pooled.size == 1:
        return pooled
    middles: Floats = pooled[:-1] + 0.5 * np.diff(pooled)
    if middles.size <= 2 * EXTREMES + EVENLY_SPACED:
        return middles
    inner = np.linspace(EXTREMES, middles.size - EXTREMES - 1, EVENLY_SPACED).astype(int)
    keep = np.concatenate([np.arange(EXTREMES), inner, np.arange(-EXTREMES, 0) + middles.size])
    return np.asarray(middles[np.unique(keep)], dtype=np.float64)
