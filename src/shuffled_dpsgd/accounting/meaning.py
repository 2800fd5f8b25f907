"""What an (ε, δ) means to the people in the data, each figure a proven bound.

- Both adjacencies: what it costs to be in the data at all, and what it costs to have one's values
  replaced by others.
- The best attacker who must tell whether one record was in the data, knows everything else and sees
  every step. From δ(ε) of "with" against "without", any test with false-positive rate α has a
  true-positive rate of at most min over real ε of e^ε·α + δ(ε), and no test does better than its
  advantage δ(0) (true minus false positives).
- Whoever owns k records. Given the others, they join a step independently, so the sum moves by
  at most the number that joined, and `pairs_of` prices the mixture over that number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from shuffled_dpsgd.accounting.together import claim_together
from shuffled_dpsgd.core.claim import Kind, PrivacyClaim
from shuffled_dpsgd.core.events import SampledGaussian
from shuffled_dpsgd.core.pld import DeltaCurve, compose, directions, frame_for, lattices_for, price

FALSE_POSITIVE_RATES = (0.01, 0.001)
GROUP_SIZES = (2, 4, 8)
GROUP_ERROR = 1e-3
CURVE_ERROR = 1e-4
SMALL_DELTA = 1e-12


@dataclass(frozen=True, kw_only=True)
class Meaning:
    """Proven bounds for one run: none of them can be exceeded, whoever attacks.

    `true_positive_rates` holds pairs (false-positive rate, bound of the true-positive rate), and
    `groups` pairs (number of records of one owner, claim about that owner), infinite where nothing
    is proven. `protected` is what is added or removed: a record, or a unit of several.
    """

    add_remove: PrivacyClaim
    replace_one: PrivacyClaim
    advantage: float
    true_positive_rates: tuple[tuple[float, float], ...]
    groups: tuple[tuple[int, PrivacyClaim], ...]
    protected: str = "record"
    kind: Kind = "proven"

    def describe(self) -> tuple[str, ...]:
        """Lines for people; each says that it is proven."""
        rates = ", ".join(
            f"at most {rate:.3g} at {alpha:.1%} false positives"
            for alpha, rate in self.true_positive_rates
        )
        owner, known = f"whoever owns several {self.protected}s", list[str]()
        for k, claim in self.groups:
            known += [f"{claim.epsilon:.3g} for {k}"] if claim.epsilon < math.inf else []
        if math.isinf(self.add_remove.epsilon):
            return (f"nothing is {self.kind} of any {self.protected}",)
        return (
            f"ε by adjacency ({self.kind}): {self.add_remove.epsilon:.4g} if a {self.protected} is "
            f"added or removed, {self.replace_one.epsilon:.4g} if it is replaced",
            f"best attacker ({self.kind}): advantage at most {self.advantage:.3g}; "
            f"true positives {rates}",
            f"ε of {owner} ({self.kind}): {', '.join(known)}"
            if known
            else f"nothing is {self.kind} of {owner}",
        )

    def to_json(self) -> dict[str, Any]:
        """Plain data, with the kind beside every figure."""
        return {
            "kind": self.kind,
            "epsilon_of": self.protected,
            "epsilon_by_adjacency": {
                "add-remove": _plain(self.add_remove),
                "replace-one": _plain(self.replace_one),
            },
            "attacker": {
                "kind": self.kind,
                "advantage": self.advantage,
                "true_positive_rates": [
                    {"false_positive_rate": alpha, "true_positive_rate": rate}
                    for alpha, rate in self.true_positive_rates
                ],
            },
            "epsilon_by_records": [{"records": k, **_plain(claim)} for k, claim in self.groups],
        }


def _plain(claim: PrivacyClaim) -> dict[str, Any]:
    return {**claim.to_json(), "epsilon": claim.epsilon if math.isfinite(claim.epsilon) else None}


@lru_cache(maxsize=64)
def what_it_means(
    runs: tuple[SampledGaussian, ...], delta: float, protected: str = "record"
) -> Meaning:
    """All bounds of this page for one run, or for several on the same data together."""
    here = tuple(replace(run, adjacency="add-remove") for run in runs)
    one = claim_together(here, delta)
    other = claim_together([replace(run, adjacency="replace-one") for run in runs], delta)
    curve = None if math.isinf(one.epsilon) else membership_curve(here)
    return Meaning(
        add_remove=one,
        replace_one=other,
        advantage=1.0 if curve is None else _advantage(curve),
        true_positive_rates=tuple(
            (alpha, 1.0 if curve is None else _true_positive_rate(curve, alpha))
            for alpha in FALSE_POSITIVE_RATES
        ),
        groups=tuple((k, _group_claim(one, here, f"{k} {protected}s", k)) for k in GROUP_SIZES),
        protected=protected,
    )


def membership_curve(runs: Sequence[SampledGaussian]) -> DeltaCurve:
    """An upper bound of δ(ε) of all steps with the record against all without, for many real ε."""
    steps = directions(runs)[0]
    frame = frame_for(steps, delta=SMALL_DELTA, epsilon=0.0)
    return compose(lattices_for(steps, frame, CURVE_ERROR), frame)


def _advantage(curve: DeltaCurve) -> float:
    """δ(0), which is at most δ at any ε below zero."""
    at = int(np.searchsorted(curve.epsilons, 0.0, side="right")) - 1
    return 1.0 if at < 0 else min(float(curve.upper[at]), 1.0)


def _true_positive_rate(curve: DeltaCurve, alpha: float) -> float:
    """The smallest e^ε·α + δ(ε) on the curve; where e^ε overflows it bounds nothing."""
    with np.errstate(over="ignore"):
        bounds = np.exp(curve.epsilons) * alpha + curve.upper
    return min(float(np.nanmin(bounds)), 1.0)


def _group_claim(
    one: PrivacyClaim, runs: tuple[SampledGaussian, ...], many: str, records: int
) -> PrivacyClaim:
    """The claim about an owner of so many records, added or removed together."""
    relation = f"neighbouring data sets differ by {many} of one owner, added or removed"
    same = f"neighbouring data sets differ by {runs[0].adjacency}"
    return replace(
        one,
        epsilon=price(runs, one.delta, GROUP_ERROR, records),
        assumptions=tuple(relation if each == same else each for each in one.assumptions),
        inputs={**one.inputs, "records": records},
    )
