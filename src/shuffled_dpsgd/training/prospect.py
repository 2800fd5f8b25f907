"""A bound on a plan's signal-to-noise ratio, from public quantities alone.

The norm of a clipped gradient is at most c, so that of the sum of a batch of B is at most B·c. The
norm of the noise is about σ·c·√d, for d trainable coordinates. Their ratio B / (σ·√d) bounds the
signal-to-noise ratio of one step. Over T steps the signal grows like T and the noise like √T, so
√T·B / (σ·√d) bounds that of the run. No record is needed for it.

It is a bound and no forecast. Real gradients disagree, so the ratio is many times smaller. On the
other hand the noise is spread over d directions, while a model may learn in a few. The verdicts
rest on measured runs (docs/advice.md).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from shuffled_dpsgd.accounting import calibrate_certified
from shuffled_dpsgd.accounting.banded import noise_of_sum
from shuffled_dpsgd.core.plan import PrivacyPlan
from shuffled_dpsgd.errors import require

Outlook = Literal["hopeless", "doubtful", "promising"]
HOPELESS_BELOW, PROMISING_FROM = 1.0, 5.0
_FEWEST_STEPS = 50
_MOST_EPSILON = 64.0
_EXPLAINED: dict[Outlook, str] = {
    "hopeless": "over the run the noise is longer than all gradients together, even if they agreed",
    "doubtful": "from scratch little will be learned; a good pre-trained model may do",
    "promising": "the noise leaves room to learn",
}


@dataclass(frozen=True, kw_only=True)
class Prospect:
    """The noise of a plan, and the largest signal that is possible.

    `signal_limit` is in units of the clip norm: B, or less under a batch clip. `noise_norm`, in
    the same units, is the expected norm of one step's noise.
    """

    dataset_size: int
    expected_batch_size: int
    num_steps: int
    noise_multiplier: float
    dimension: int
    signal_limit: float
    noise_norm: float

    @property
    def per_step(self) -> float:
        """Bound on the signal-to-noise ratio of one step."""
        return self.signal_limit / self.noise_norm if self.noise_norm else math.inf

    @property
    def over_run(self) -> float:
        """Bound on the signal-to-noise ratio of the whole run."""
        return math.sqrt(self.num_steps) * self.per_step

    @property
    def verdict(self) -> Outlook:
        """How promising the ratio of the run is."""
        if self.over_run < HOPELESS_BELOW:
            return "hopeless"
        return "doubtful" if self.over_run < PROMISING_FROM else "promising"

    @property
    def explanation(self) -> str:
        """The verdict in a sentence."""
        return _EXPLAINED[self.verdict]

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "expected_batch_size": self.expected_batch_size,
            "num_steps": self.num_steps,
            "noise_multiplier": self.noise_multiplier,
            "signal_to_noise_per_step": self.per_step,
            "signal_to_noise_over_run": self.over_run,
            "verdict": self.verdict,
        }


def prospect_of(plan: PrivacyPlan) -> Prospect:
    """The prospect of a plan as it stands, blocks and batch clip included."""
    batch = float(plan.expected_batch_size)
    limits = [
        batch if b.batch_clip_norm is None else min(batch, b.batch_clip_norm / plan.clip_norm)
        for b in plan.blocks
    ]
    noises = [block.noise_multiplier * math.sqrt(block.dimension) for block in plan.blocks]
    if plan.bands > 1:
        # Noise left in the last weights, spread evenly over the steps.
        left = noise_of_sum(plan.noise_rows, plan.num_steps) / math.sqrt(plan.num_steps)
        noises = [noise * left for noise in noises]
    return Prospect(
        dataset_size=plan.dataset_size,
        expected_batch_size=plan.expected_batch_size,
        num_steps=plan.num_steps,
        noise_multiplier=plan.smallest_noise_multiplier,
        dimension=sum(block.dimension for block in plan.blocks),
        signal_limit=min(batch, math.hypot(*limits)),
        noise_norm=math.hypot(*noises),
    )


def calibrated_prospect(
    *,
    epsilon: float,
    delta: float,
    dataset_size: int,
    expected_batch_size: int,
    num_steps: int,
    dimension: int,
) -> Prospect:
    """The prospect of a plan whose noise is calibrated to a certified ε."""
    for name, value in (("dataset_size", dataset_size), ("dimension", dimension)):
        require(value >= 1, name, "at least 1", value)
    found = calibrate_certified(
        epsilon=epsilon,
        delta=delta,
        sampling_prob=expected_batch_size / dataset_size,
        num_steps=num_steps,
    )
    return Prospect(
        dataset_size=dataset_size,
        expected_batch_size=expected_batch_size,
        num_steps=num_steps,
        noise_multiplier=found.noise_multiplier,
        dimension=dimension,
        signal_limit=float(expected_batch_size),
        noise_norm=found.noise_multiplier * math.sqrt(dimension),
    )


def other_batches(now: Prospect, *, epsilon: float, delta: float) -> list[Prospect]:
    """The same epochs and ε with two, four, eight times the batch, as long as steps are left."""
    found = []
    batch = 2 * now.expected_batch_size
    while batch <= now.dataset_size:
        steps = round(now.num_steps * now.expected_batch_size / batch)
        if steps < min(_FEWEST_STEPS, now.num_steps):
            break
        found.append(_changed(now, epsilon, delta, expected_batch_size=batch, num_steps=steps))
        batch *= 2
    return found


def longer(now: Prospect, *, epsilon: float, delta: float) -> Prospect:
    """Twice the epochs at the same ε."""
    return _changed(now, epsilon, delta, num_steps=2 * now.num_steps)


def best_batch(prospects: Sequence[Prospect]) -> Prospect:
    """The smallest batch within a tenth of the best ratio: a larger one buys little more."""
    best = max(p.over_run for p in prospects)
    good = [p for p in prospects if p.over_run >= 0.9 * best]
    return min(good, key=lambda p: p.expected_batch_size)


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What a plan would need to be promising, by changing one quantity alone; None if out of reach.

    More records are meant at the same sampling probability, steps and ε.
    """

    dataset_size: int
    dimension: int
    epsilon: float | None


def needs_of(now: Prospect, *, epsilon: float | None, delta: float) -> Needs:
    """The records, the parameters or the ε that would make a plan promising."""
    factor = max(1.0, PROMISING_FROM / now.over_run) if now.over_run else math.inf
    enough, then = epsilon, now
    while enough is not None and then.over_run < PROMISING_FROM:
        enough = 2.0 * enough if 2.0 * enough <= _MOST_EPSILON else None
        if enough is not None:
            then = _changed(now, enough, delta)
    return Needs(
        dataset_size=math.ceil(now.dataset_size * factor),
        dimension=max(1, math.floor(now.dimension / factor**2)),
        epsilon=enough,
    )


def _changed(now: Prospect, epsilon: float, delta: float, **changes: int) -> Prospect:
    names = ("dataset_size", "expected_batch_size", "num_steps", "dimension")
    settings = {name: getattr(now, name) for name in names} | changes
    return calibrated_prospect(epsilon=epsilon, delta=delta, **settings)


def suggested_learning_rate(
    now: Prospect, *, weight_scale: float, optimizer: str, clip_norm: float
) -> float:
    """A rate at which the noise of a run moves a weight by about half of what weights are.

    Adam's steps are about the learning rate in every coordinate, and where noise dominates they
    are a random walk: after T of them a weight has moved by √T rates. SGD's steps have the noise
    itself, σ·c/B. `weight_scale` is the root mean square of the public initial weights.
    """
    walk = math.sqrt(now.num_steps)
    if optimizer == "sgd":
        walk *= max(now.noise_multiplier, 1e-12) * clip_norm / now.expected_batch_size
    rate = 0.5 * weight_scale / walk
    return float(f"{rate:.1g}")
