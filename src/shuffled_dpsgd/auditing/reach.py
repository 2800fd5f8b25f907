"""How far an audit of training reaches: what was run, what that would have caught, what it cannot.

An audit that finds nothing says little by itself. This states, in words and with the largest bound
the sample could have given, which mistakes a clean report excludes and which it does not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from shuffled_dpsgd.auditing.estimators import Inclusion, OneRunFDP, OrderStatistics, ScorePair

CATCHES: dict[str, dict[str, str]] = {
    "step": {
        "fixed index": "a canary left where it was planted: no shuffle, or one that repeats itself",
        "orbit maximum": "a spike that stands out of the noise wherever the shuffle put it",
        "axis sum": "noise too small along an axis sum, which no permutation changes",
        "re-alignment against W_t": "a shuffle that can be undone from the weights before the step",
        "un-permuted tensor": "noise too small on the largest tensor that does not move",
        "noise on all tensors": "noise too small overall, before the shuffle",
        "difference of two steps": "noise that repeats itself between steps",
    },
    "one-run": {
        "noise of every step": "noise below the certified multiplier, on the average over the run",
        "re-alignment along the run": "noise too small over the run, by whoever has every step",
        "re-alignment against W_0": "noise too small over the run, seen in first and last weights",
        "un-permuted tensors": "noise too small in tensors that do not move, by last weights",
        "loss threshold": "records that the released model remembers, seen by its loss alone",
    },
}
NOT_RUN = {
    "step": "leaks that build up over a run: audit run --mode one-run",
    "one-run": "the worst neighbours of one step, where the other records contribute nothing: "
    "audit run --mode step",
}
NEVER_CAUGHT = (
    "a clip that is not respected, or sums that carry over: audit sensitivity",
    "noise missing on one small tensor: the referee of every run",
    "shadow models for every record: audit blackbox",
    "a true ε between the largest bound below and the certified one",
    "random numbers an adversary can predict, and whatever happens outside this training loop",
)


@dataclass(frozen=True, kw_only=True)
class Reach:
    """`largest_bound`: what a perfect adversary would have shown of any mechanism (measured)."""

    ran: tuple[str, ...]
    would_have_caught: tuple[str, ...]
    could_not: tuple[str, ...]
    largest_bound: float

    def to_json(self) -> dict[str, object]:
        return {
            "ran": list(self.ran),
            "would_have_caught": list(self.would_have_caught),
            "could_not": list(self.could_not),
            "largest_possible_bound": {"epsilon": self.largest_bound, "kind": "measured"},
        }


def reach_of(
    mode: str, adversaries: tuple[str, ...], *, count: int, delta: float, confidence: float
) -> Reach:
    """Of a step audit with `count` releases in each world, or `count` canaries in one run."""
    step, included = mode == "step", np.arange(count) % 2 == 0
    perfect: Any = Inclusion(scores=included.astype(float), included=included)
    if step:
        perfect = ScorePair(out=np.zeros(count), present=np.ones(count))
    estimator: Any = OrderStatistics() if step else OneRunFDP()
    bound = estimator.lower_bound(perfect, delta=delta, confidence=confidence)
    catches = CATCHES[mode]
    missing = tuple(
        f"{what}: {name} was not run, this run leaves no room for it"
        for name, what in catches.items()
        if name not in adversaries
    )
    return Reach(
        ran=adversaries,
        would_have_caught=tuple(catches[name] for name in adversaries if name in catches),
        could_not=(*missing, NOT_RUN[mode], *NEVER_CAUGHT),
        largest_bound=bound.epsilon,
    )
