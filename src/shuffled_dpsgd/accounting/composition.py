"""Composition and subsampling as the paper uses them (Steinke 2022, Theorems 22 and 29).

Both theorems are proven; what they are fed decides whether the outcome is. Legend: `e`, `d` the
(ε, δ) of one *sampled* step; `ε_s`, `δ_s` the (ε, δ) of the mechanism inside the step, before
sampling; δ' the part of δ spent on advanced composition; T num_steps; q sampling_prob.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from shuffled_dpsgd.core.events import check_delta, check_sampling
from shuffled_dpsgd.errors import InvalidArgumentError


@dataclass(frozen=True, kw_only=True)
class StepBudget:
    """What one step's mechanism may spend before sampling: (`epsilon`, `delta`)."""

    epsilon: float
    delta: float


def compose(step_epsilon: float, num_steps: int, slack: float) -> float:
    """ε of T steps of ε each: the better of basic and advanced composition (Thm. 22).

    `slack` is δ'; the composed δ is T·δ_step + δ'.
    """
    square = num_steps * step_epsilon * step_epsilon
    advanced = 0.5 * square + math.sqrt(2.0 * square * math.log(1.0 / slack))
    return min(num_steps * step_epsilon, advanced)


def decompose(epsilon: float, num_steps: int, slack: float) -> float:
    """The per-step ε whose T-fold `compose` is exactly `epsilon`.

    >>> round(compose(decompose(1.0, 500, 2.5e-6), 500, 2.5e-6), 12)
    1.0
    """
    root = math.sqrt(2.0 * num_steps * math.log(1.0 / slack))
    # The positive root of T/2·e² + root·e − ε, in the form that does not cancel.
    advanced = 2.0 * epsilon / (root + math.sqrt(root * root + 2.0 * num_steps * epsilon))
    return max(epsilon / num_steps, advanced)


def amplify(step_epsilon: float, sampling_prob: float) -> float:
    """ε after Poisson sampling (Thm. 29): log(1 + q(e^ε − 1)), without overflow."""
    if sampling_prob == 1.0:
        return step_epsilon
    if step_epsilon > 30.0:
        log_q = math.log(sampling_prob)
        return (
            step_epsilon + log_q + math.log1p(math.exp(-step_epsilon - log_q) * (1 - sampling_prob))
        )
    return math.log1p(sampling_prob * math.expm1(step_epsilon))


def unamplify(step_epsilon: float, sampling_prob: float) -> float:
    """The ε before sampling that `amplify` brings to `step_epsilon`.

    >>> round(amplify(unamplify(0.3, 0.02), 0.02), 12)
    0.3
    """
    if sampling_prob == 1.0:
        return step_epsilon
    if step_epsilon > 30.0:
        rest = math.log1p(-(1.0 - sampling_prob) * math.exp(-step_epsilon))
        return step_epsilon + rest - math.log(sampling_prob)
    return math.log1p(math.expm1(step_epsilon) / sampling_prob)


def step_delta(delta: float, sampling_prob: float, num_steps: int, delta_split: float) -> float:
    """δ_s = (δ − δ')/(T·q) with δ' = `delta_split` · δ."""
    check_delta(delta)
    check_sampling(sampling_prob, num_steps)
    check_split(delta_split)
    result = (1.0 - delta_split) * delta / (num_steps * sampling_prob)
    if result >= 1.0:
        raise InvalidArgumentError(
            "delta_split",
            expected="a split that leaves each step a delta below 1",
            got=f"{delta_split:g}, a step delta of {result:.3g}",
            remedy="lower delta, or account for more steps or a larger sampling_prob",
        )
    return result


def step_budget(
    *, epsilon: float, delta: float, sampling_prob: float, num_steps: int, delta_split: float
) -> StepBudget:
    """Undo composition, then sampling: what the mechanism inside one step must satisfy."""
    inner_delta = step_delta(delta, sampling_prob, num_steps, delta_split)
    sampled_epsilon = decompose(epsilon, num_steps, delta_split * delta)
    return StepBudget(epsilon=unamplify(sampled_epsilon, sampling_prob), delta=inner_delta)


def total_epsilon(
    step_epsilon: float, *, delta: float, sampling_prob: float, num_steps: int, delta_split: float
) -> float:
    """Sampling, then composition: ε of the run from ε_s of the mechanism inside one step."""
    return compose(amplify(step_epsilon, sampling_prob), num_steps, delta_split * delta)


def check_split(delta_split: float) -> None:
    """Refuse a split that leaves one of the two parts of δ empty."""
    if not 0.0 < delta_split < 1.0:
        raise InvalidArgumentError(
            "delta_split",
            expected="a share strictly between 0 and 1",
            got=delta_split,
            remedy="0.5 halves delta between composition and the steps; 'optimised' searches",
        )
