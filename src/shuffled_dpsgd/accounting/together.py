"""Several runs on the same data, priced as one: what whoever sees all of them learns.

By privacy-loss distributions (`price`), where noise, sampling probability and steps of every run
are settled before the first. Models, data order, learning rates and the number of runs that are
made of those may depend on what earlier runs released.

By Rényi DP, which also covers
- settings that were chosen by what earlier runs released, if one order is fixed beforehand: the
  divergences at that order add up (Feldman & Zrnic 2021, Thm. 3.1);
- the best of a random number of runs, of which only the best is published (Papernot & Steinke
  2022, Thm. 6 by `dp_accounting`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np

from shuffled_dpsgd.accounting.rdp import (
    ORDERS,
    Array,
    divergences,
    divergences_of,
    sampled_gaussian,
)
from shuffled_dpsgd.core.certified import ASSUMPTIONS, METHOD, RELATIVE_ERROR
from shuffled_dpsgd.core.claim import PrivacyClaim
from shuffled_dpsgd.core.events import SampledGaussian, check_delta
from shuffled_dpsgd.core.pld import price
from shuffled_dpsgd.errors import InvalidArgumentError

SETTLED = (
    "noise, sampling probability and steps of no run were chosen by what another released, or by "
    "the records"
)
DRAWN = (
    "a search drew the number of its runs from a Poisson distribution before the first, the "
    "settings of each independently, and publishes the best one and nothing of the others"
)


@dataclass(frozen=True, kw_only=True)
class BestOf:
    """The best of Poisson(`mean`) runs, each with the noise and the steps of `run`."""

    run: SampledGaussian
    mean: float

    def __post_init__(self) -> None:
        if not 1.0 <= self.mean < math.inf:
            raise InvalidArgumentError("mean", expected="a number of runs >= 1", got=self.mean)
        if self.run.adjacency != "add-remove":
            raise InvalidArgumentError(
                "adjacency",
                expected="add-remove for the best of several runs",
                got=self.run.adjacency,
                remedy="count every run by itself: publish all of them",
            )


Spent: TypeAlias = SampledGaussian | BestOf


def claim_together(runs: Sequence[Spent], delta: float) -> PrivacyClaim:
    """The proven ε of all runs together, their settings settled beforehand.

    By loss distributions; by Rényi DP where there is a search among them.
    """
    check_delta(delta)
    plain = [run for run in runs if isinstance(run, SampledGaussian)]
    if len(plain) < len(runs):
        return _renyi_claim(runs, delta, None)
    if len({run.adjacency for run in plain}) != 1:
        raise InvalidArgumentError(
            "adjacency", expected="one and the same for all runs", got=[r.adjacency for r in plain]
        )
    epsilon = price(tuple(sorted(plain, key=repr)), delta, RELATIVE_ERROR)
    method = METHOD if len(plain) == 1 else f"{METHOD} of {len(plain)} runs"
    return _claim(runs, epsilon, delta, method)


def claim_of_any_choice(
    runs: Sequence[Spent], delta: float, *, limit: float
) -> PrivacyClaim | None:
    """The proven ε of all runs, whatever their settings were chosen by.

    The order is fixed before the first release: by δ, a `limit` of ε that was stated beforehand,
    and the settings of the first run, which it lets fill that limit most often. None for
    adjacencies that Rényi DP is not computed for.
    """
    if any(run.adjacency != "add-remove" for run in runs if isinstance(run, SampledGaussian)):
        return None
    room = limit - np.log1p(-1.0 / ORDERS) + (math.log(delta) + np.log(ORDERS)) / (ORDERS - 1.0)
    return _renyi_claim(runs, delta, int(np.argmax(room / _divergences_of(runs[0]))))


def _renyi_claim(runs: Sequence[Spent], delta: float, at: int | None) -> PrivacyClaim:
    """By the order of this number, or by the best one for runs that are settled."""
    from dp_accounting.rdp.rdp_privacy_accountant import compute_epsilon

    total = np.sum([_divergences_of(run) for run in runs], axis=0)
    chosen = slice(None) if at is None else slice(at, at + 1)
    epsilon, order = compute_epsilon(ORDERS[chosen], total[chosen], delta)
    method = f"Rényi DP of order {order:.4g}"
    return _claim(runs, float(epsilon), delta, method, settled=at is None)


def _claim(
    runs: Sequence[Spent], epsilon: float, delta: float, method: str, *, settled: bool = True
) -> PrivacyClaim:
    first = runs[0] if isinstance(runs[0], SampledGaussian) else runs[0].run
    searched = any(isinstance(run, BestOf) for run in runs)
    return PrivacyClaim(
        epsilon=epsilon,
        delta=delta,
        method=method,
        kind="proven",
        assumptions=(
            *ASSUMPTIONS,
            f"neighbouring data sets differ by {first.adjacency}",
            *([SETTLED] if settled and len(runs) > 1 else []),
            *([DRAWN] if searched else []),
        ),
        inputs={"runs": [_plain(run) for run in runs]} if len(runs) > 1 else _plain(runs[0]),
    )


def _plain(run: Spent) -> dict[str, Any]:
    return (
        asdict(run) if isinstance(run, SampledGaussian) else asdict(run.run) | {"best_of": run.mean}
    )


def runs_of(claim: PrivacyClaim) -> tuple[SampledGaussian, ...]:
    """The runs that a claim of this package was computed from; none before the first release."""
    return tuple(SampledGaussian(**run) for run in claim.inputs.get("runs", [claim.inputs]) if run)


@lru_cache(maxsize=256)
def _divergences_of(run: Spent) -> Array:
    """D_α of a whole run or search, at every order."""
    from dp_accounting import dp_event

    if isinstance(run, SampledGaussian):
        return run.num_steps * divergences(run.noise_multiplier, run.sampling_prob)
    step = sampled_gaussian(run.run.noise_multiplier, run.run.sampling_prob)
    whole = dp_event.SelfComposedDpEvent(step, run.run.num_steps)
    return divergences_of(dp_event.RepeatAndSelectDpEvent(whole, run.mean, math.inf), ORDERS)
