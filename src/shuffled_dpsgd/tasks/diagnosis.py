"""Finds out from a run's metrics whether it learns, and says what to change.

Training metrics have no noise. No ε covers publishing what is said here, nor choosing the settings
of another run by it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from shuffled_dpsgd.core.plan import PrivacyPlan
from shuffled_dpsgd.reports import StepRecord
from shuffled_dpsgd.training.metrics import plain
from shuffled_dpsgd.training.prospect import prospect_of

FIRST_LOOK = 10
_PART = 5
# Thresholds chosen on runs on the digits (docs/advice.md).
SWAMPED_BELOW = 0.3
_ALL = 0.99
_FAR = 10.0
_RISE = 1.02
_CHANCE = 0.01


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something that is wrong with a run, and what to change."""

    kind: Literal["noise", "clipped", "loss", "majority", "nonfinite"]
    message: str
    advice: str

    def describe(self) -> str:
        """One line."""
        return f"{self.message}; {self.advice}"


def diagnose(records: Sequence[StepRecord], plan: PrivacyPlan) -> list[Finding]:
    """What is wrong so far; in the first steps only records without a finite gradient."""
    found = []
    if len(records) >= FIRST_LOOK:
        found = [look(records, plan) for look in (_noise, _loss, _majority, _clipped)]
    return [finding for finding in (*found, _nonfinite(records)) if finding is not None]


def _noise(records: Sequence[StepRecord], plan: PrivacyPlan) -> Finding | None:
    ratios = _values(records, "signal_to_noise")
    if not ratios:
        return None
    mean = fmean(ratios)
    over_run = mean * math.sqrt(plan.num_steps)
    if over_run >= SWAMPED_BELOW:
        return None
    now, fewer, more = prospect_of(plan), 1, "far more records"
    if over_run:
        factor = SWAMPED_BELOW / over_run
        fewer = max(1, math.floor(now.dimension / factor**2))
        more = f"{factor:,.2g} times the records"
    batch = min(plan.dataset_size, 4 * plan.expected_batch_size)
    return Finding(
        kind="noise",
        message=f"noise swamps the signal: their ratio is {mean:.2g} a step and "
        f"{over_run:.2g} over the run; below {SWAMPED_BELOW:g} little is learned",
        advice=f"try a larger batch ({batch:,} instead of {plan.expected_batch_size:,}), fewer "
        f"trainable parameters (lora_rank, freeze; at most {fewer:,} of {now.dimension:,} would do "
        f"alone), {more}, or a larger ε; `shuffled-dpsgd advise` computes what each of them gives",
    )


def _loss(records: Sequence[StepRecord], plan: PrivacyPlan) -> Finding | None:
    losses = _values(records, "loss")
    part = len(losses) // _PART
    if part < 2:
        return None
    first, last = fmean(losses[:part]), fmean(losses[-part:])
    if last <= first * _RISE:
        return None
    rate = max(record.learning_rate for record in records)
    return Finding(
        kind="loss",
        message=f"the training loss has risen, from {first:.3g} to {last:.3g}",
        advice=f"try a smaller learning rate than {rate:g} (a third, then a tenth), a warm-up, or "
        f"a larger batch than {plan.expected_batch_size:,}: noise moves the weights more than the "
        "gradients do",
    )


def _majority(records: Sequence[StepRecord], plan: PrivacyPlan) -> Finding | None:
    last = next((record for record in reversed(records) if record.heldout_score is not None), None)
    if last is None or last.heldout_score is None or last.heldout_baseline is None:
        return None
    single = last.predicted_classes == 1
    if not single and last.heldout_score > last.heldout_baseline + _CHANCE:
        return None
    how = "one class for every record" if single else "no better than always the commonest class"
    typical, clip = _typical_norm(records), ""
    if typical is not None and typical > plan.clip_norm:
        clip = (
            f"; and try a clip norm of about {typical:.1g} instead of {plan.clip_norm:g}: all "
            "gradients are clipped, so records that are answered well pull as hard as others, and "
            "the commonest class wins"
        )
    return Finding(
        kind="majority",
        message=f"the model answers {how}: held-out accuracy {last.heldout_score:.3f}, where the "
        f"commonest class alone gives {last.heldout_baseline:.3f}",
        advice="it has learned nothing yet: see to the noise first (larger batch, fewer trainable "
        f"parameters, more steps), then to the learning rate{clip}",
    )


def _clipped(records: Sequence[StepRecord], plan: PrivacyPlan) -> Finding | None:
    typical = _typical_norm(records)
    if typical is None or typical < _FAR * plan.clip_norm:
        return None
    return Finding(
        kind="clipped",
        message=f"all gradients were clipped, typically from {typical:.2g} to {plan.clip_norm:g}",
        advice="all of them count alike then, records that are answered well and others, and a "
        "classifier may drift to the commonest class: try a clip norm some ten times larger; with "
        "SGD, whose learning rate is in units of it, a learning rate as many times smaller",
    )


def _nonfinite(records: Sequence[StepRecord]) -> Finding | None:
    broken = [(record.step, record.num_nonfinite) for record in records if record.num_nonfinite]
    if not broken:
        return None
    total = sum(number for _, number in broken)
    times = "time" if total == 1 else "times"
    return Finding(
        kind="nonfinite",
        message=f"a record without a finite gradient was drawn {total} {times}, first at step "
        f"{broken[0][0]}; it contributed nothing",
        advice='look for NaN or infinite values in the data, and try precision = "float32"',
    )


def _typical_norm(records: Sequence[StepRecord]) -> float | None:
    """The median of the gradient norms, where nearly all of them were clipped."""
    shares, norms = _values(records, "clipped_share"), _values(records, "median_norm")
    if not shares or not norms or fmean(shares) < _ALL:
        return None
    return sorted(norms)[len(norms) // 2]


def _values(records: Sequence[StepRecord], name: str) -> list[float]:
    return [plain(value) for r in records if (value := getattr(r, name)) is not None]
