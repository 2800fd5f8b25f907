"""Several runs on the same data, priced as one: what whoever sees all of them learns.

By privacy-loss distributions (`price`), where the number of runs and the noise, sampling
probability and steps of each are settled before the first. Models, data order and learning rates
may depend on what earlier runs released. How many of the settled runs are made may depend on it
too, but then the ε of all that might have been made counts.

By Rényi DP, which also covers
- a `Filter`, where everything may depend on what earlier runs released: an order and a limit are
  fixed beforehand, and no run is made that would bring the sum of the divergences at that order
  above the limit (Feldman & Zrnic 2021, Thm. 3.1). Only the limit is proven, and not what the runs
  made so far add up to: had they released something else, other runs would have been made;
- the best of a random number of runs, of which only the best is published (Papernot & Steinke
  2022, Thm. 6 by `dp_accounting`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np

from shuffled_dpsgd.accounting.rdp import (
    ORDERS,
    Array,
    divergences,
    divergences_of,
    refuse_special,
    sampled_gaussian,
)
from shuffled_dpsgd.core.certified import ASSUMPTIONS, METHOD, RELATIVE_ERROR
from shuffled_dpsgd.core.claim import PrivacyClaim
from shuffled_dpsgd.core.events import SampledGaussian, check_delta
from shuffled_dpsgd.core.pld import price
from shuffled_dpsgd.errors import InvalidArgumentError, require

SETTLED = (
    "neither how many runs there are nor the noise, sampling probability and steps of any were "
    "chosen by what another released, or by the records"
)
FILTERED = (
    "every run is refused that would exceed the limit; how many there are, and what each is, may "
    "have been chosen by what others released"
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
        expected = "add-remove for the best of several runs"
        remedy = "count every run by itself: publish all of them"
        require(
            self.run.adjacency == "add-remove", "adjacency", expected, self.run.adjacency, remedy
        )


Spent: TypeAlias = SampledGaussian | BestOf


def claim_together(runs: Sequence[Spent], delta: float) -> PrivacyClaim:
    """The proven ε of all runs together, their settings settled beforehand.

    By loss distributions; by Rényi DP where there is a search among them.
    """
    check_delta(delta)
    plain = [run for run in runs if isinstance(run, SampledGaussian)]
    if len(plain) < len(runs):
        return _renyi_claim(runs, delta)
    if len({run.adjacency for run in plain}) != 1:
        raise InvalidArgumentError(
            "adjacency", expected="one and the same for all runs", got=[r.adjacency for r in plain]
        )
    epsilon = price(tuple(sorted(plain, key=repr)), delta, RELATIVE_ERROR)
    method = METHOD if len(plain) == 1 else f"{METHOD} of {len(plain)} runs"
    return _claim(runs, epsilon, delta, method)


@dataclass(frozen=True, kw_only=True)
class Filter:
    """A limit of ε for runs of any choice: a Rényi order, and the divergence it has room for.

    The order is fixed before the first release, by δ, the limit and the settings of the first run,
    which it lets fill the limit most often.
    """

    epsilon: float
    delta: float
    first: Spent

    def share(self, runs: Sequence[Spent]) -> float:
        """How much of the limit is used; above one the limit does not hold."""
        room = float(self._room[self._at])
        used = float(sum(_divergences_of(run)[self._at] for run in runs))
        return used / room if room > 0.0 else math.inf

    def claim(self, runs: Sequence[Spent]) -> PrivacyClaim:
        """The limit, proven for runs that it was kept for; nothing for others."""
        epsilon = self.epsilon if self.share(runs) <= 1.0 else math.inf
        method = f"a Rényi filter of order {ORDERS[self._at]:.4g}"
        return _claim(runs, epsilon, self.delta, method, FILTERED)

    @property
    def _room(self) -> Array:
        """The divergence at every order that converts to the limit (Canonne et al. 2020)."""
        log_terms = (math.log(self.delta) + np.log(ORDERS)) / (ORDERS - 1.0)
        return self.epsilon - np.log1p(-1.0 / ORDERS) + log_terms

    @property
    def _at(self) -> int:
        return int(np.argmax(self._room / _divergences_of(self.first)))


def _renyi_claim(runs: Sequence[Spent], delta: float) -> PrivacyClaim:
    """The claim by Rényi DP, of the order that is best once all runs are known."""
    from dp_accounting.rdp.rdp_privacy_accountant import compute_epsilon

    total = np.sum([_divergences_of(run) for run in runs], axis=0)
    epsilon, order = compute_epsilon(ORDERS, total, delta)
    return _claim(runs, float(epsilon), delta, f"Rényi DP of order {order:.4g}")


def _claim(
    runs: Sequence[Spent], epsilon: float, delta: float, method: str, chosen: str = SETTLED
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
            *([chosen] if len(runs) > 1 or chosen != SETTLED else []),
            *([DRAWN] if searched else []),
        ),
        inputs={"runs": [_plain(run) for run in runs]} if len(runs) > 1 else _plain(runs[0]),
    )


def _plain(run: Spent) -> dict[str, Any]:
    if isinstance(run, SampledGaussian):
        return run.to_json()
    return run.run.to_json() | {"best_of": run.mean}


def runs_of(claim: PrivacyClaim) -> tuple[SampledGaussian, ...]:
    """The runs that a claim of this package was computed from; none before the first release."""
    return tuple(SampledGaussian(**run) for run in claim.inputs.get("runs", [claim.inputs]) if run)


@lru_cache(maxsize=256)
def _divergences_of(run: Spent) -> Array:
    """D_α of a whole run or search, at every order."""
    from dp_accounting import dp_event

    refuse_special(run if isinstance(run, SampledGaussian) else run.run)
    if isinstance(run, SampledGaussian):
        return run.num_steps * divergences(run.noise_multiplier, run.sampling_prob)
    step = sampled_gaussian(run.run.noise_multiplier, run.run.sampling_prob)
    whole = dp_event.SelfComposedDpEvent(step, run.run.num_steps)
    return divergences_of(dp_event.RepeatAndSelectDpEvent(whole, run.mean, math.inf), ORDERS)
