"""Every accountant behind one interface, and the table that sets them side by side.

An accountant prices a `SampledGaussian` or refuses; `tests/conformance` holds all of them to the
same rules. `certified` is the one to rely on; `paper` is an estimate; the others are what the
paper compares itself with.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from shuffled_dpsgd.accounting.calibration import (
    Calibration,
    calibrate_certified,
    check_epsilon,
    smallest_noise_multiplier,
)
from shuffled_dpsgd.accounting.paper import PaperCalibration, calibrate_paper, paper_claim
from shuffled_dpsgd.accounting.rdp import rdp_epsilon, refuse_special
from shuffled_dpsgd.accounting.theorem import gaussian_epsilon
from shuffled_dpsgd.core.certified import ASSUMPTIONS, claim_for
from shuffled_dpsgd.core.claim import Adjacency, Kind, PrivacyClaim
from shuffled_dpsgd.core.events import SampledGaussian, check_delta
from shuffled_dpsgd.errors import InvalidArgumentError, require


@dataclass(frozen=True, kw_only=True)
class Target:
    """What a calibration must meet: a budget for a run whose noise is still open."""

    epsilon: float
    delta: float
    sampling_prob: float
    num_steps: int
    adjacency: Adjacency = "add-remove"
    largest_batch: int | None = None
    dataset_size: int | None = None
    steps_per_block: int | None = None

    def __post_init__(self) -> None:
        check_epsilon(self.epsilon)
        check_delta(self.delta)
        self.mechanism(1.0)

    def mechanism(self, noise_multiplier: float) -> SampledGaussian:
        """The run with this much noise."""
        run = {k: v for k, v in asdict(self).items() if k not in ("epsilon", "delta")}
        return SampledGaussian(noise_multiplier=noise_multiplier, **run)


@dataclass(frozen=True, kw_only=True)
class Accountant:
    """Prices a mechanism, and finds the noise for a price; refuses adjacencies it cannot price."""

    name: str
    kind: Kind
    price: Callable[[SampledGaussian, float], PrivacyClaim]
    find: Callable[[Target], Calibration | PaperCalibration]
    adjacencies: tuple[Adjacency, ...] = ("add-remove",)

    def claim(self, mechanism: SampledGaussian, delta: float) -> PrivacyClaim:
        """What a run costs."""
        self._check(mechanism)
        return self.price(mechanism, delta)

    def calibrate(self, target: Target) -> Calibration | PaperCalibration:
        """The least noise that meets a budget."""
        self._check(target.mechanism(1.0))
        return self.find(target)

    def _check(self, run: SampledGaussian) -> None:
        if self.name != "certified":
            refuse_special(run)
        expected = f"one of {self.adjacencies} for {self.name}"
        remedy = "use the certified accountant for it"
        require(run.adjacency in self.adjacencies, "adjacency", expected, run.adjacency, remedy)


def by_formula(
    name: str, kind: Kind, *, method: str, formula: Callable[[SampledGaussian, float], float],
    note: str,
) -> Accountant:  # fmt: skip
    """An accountant given by one function (mechanism, δ) -> ε, decreasing in the noise."""

    def price(mechanism: SampledGaussian, delta: float) -> PrivacyClaim:
        check_delta(delta)
        return PrivacyClaim(
            epsilon=formula(mechanism, delta),
            delta=delta,
            method=method,
            kind=kind,
            assumptions=(*ASSUMPTIONS, note),
            inputs=mechanism.to_json(),
        )

    def find(target: Target) -> Calibration:
        def pricing(sigma: float) -> float:
            return formula(target.mechanism(sigma), target.delta)

        guess = 1.0 + 1.0 / target.epsilon
        noise = smallest_noise_multiplier(target.epsilon, pricing, guess=guess)
        return Calibration(
            noise_multiplier=noise, claim=price(target.mechanism(noise), target.delta)
        )

    return Accountant(name=name, kind=kind, price=price, find=find)


def gdp_epsilon(mechanism: SampledGaussian, delta: float) -> float:
    """ε by the central limit theorem of Gaussian DP (Bu et al. 2020): no bound in either direction.

    The run is taken for a Gaussian mechanism with μ = q·√(T·(e^{1/σ²} − 1)).
    """
    noise = mechanism.noise_multiplier
    if noise < 0.05:
        # e^{1/σ²} overflows near 0.038; the approximation is meaningless long before.
        return math.inf
    mu = mechanism.sampling_prob * math.sqrt(mechanism.num_steps * math.expm1(noise**-2))
    return gaussian_epsilon(1.0 / mu, delta)


def advanced_composition_epsilon(mechanism: SampledGaussian, delta: float) -> float:
    """ε by the paper's composition with d = 1: the exact Gaussian, sampled, composed (Thm. 22)."""
    facts = mechanism.to_json()
    del facts["adjacency"]
    return paper_claim(**facts, delta=delta, dimension=1, batch_clip=1.0).epsilon


RDP = by_formula(
    "rdp",
    "proven",
    method="Rényi DP",
    formula=rdp_epsilon,
    note="proven but loose: moments at a finite set of orders",
)
STANDARD = (
    Accountant(
        name="certified",
        kind="proven",
        price=claim_for,
        find=lambda target: calibrate_certified(**asdict(target)),
        adjacencies=("add-remove", "replace-one"),
    ),
    RDP,
    by_formula(
        "gdp",
        "heuristic",
        method="Gaussian DP, central limit",
        formula=gdp_epsilon,
        note="approximate: the central limit theorem bounds epsilon in neither direction",
    ),
    by_formula(
        "advanced_composition",
        "proven",
        method="advanced composition, d = 1",
        formula=advanced_composition_epsilon,
        note="the exact Gaussian, sampled and composed (Steinke 2022, Thms. 22 and 29)",
    ),
)


def accountants(
    *, dimension: int | None = None, batch_clip: float | None = None, delta_split: float = 0.5
) -> tuple[Accountant, ...]:
    """The standard accountants, and the paper's where a dimension asks for it.

    The paper's formula needs both `dimension` and `batch_clip`; neither has a default.
    """
    if dimension is None and batch_clip is None:
        return STANDARD
    if batch_clip is None:
        raise InvalidArgumentError(
            "batch_clip",
            expected="the ratio c'/c of batch clip to per-example clip",
            got=None,
            remedy="the paper never states it and it decides the outcome; its text implies 1",
        )
    if dimension is None:
        raise InvalidArgumentError(
            "dimension",
            expected="the number of shuffled coordinates",
            got=None,
            remedy="leave batch_clip out, too, if the paper's estimate is not wanted",
        )
    given: dict[str, Any] = {
        "dimension": dimension,
        "batch_clip": batch_clip,
        "delta_split": delta_split,
    }

    def facts(of: SampledGaussian | Target) -> dict[str, Any]:
        found = {name: value for name, value in asdict(of).items() if value is not None}
        del found["adjacency"]
        return given | found

    paper = Accountant(
        name="paper",
        kind="heuristic",
        price=lambda mechanism, delta: paper_claim(**facts(mechanism), delta=delta),
        find=lambda target: calibrate_paper(**facts(target)),
    )
    return (*STANDARD, paper)


def compare(
    *,
    delta: float,
    dimension: int | None = None,
    batch_clip: float | None = None,
    delta_split: float = 0.5,
    **run: Any,
) -> dict[str, PrivacyClaim]:
    """One `run` (the fields of a `SampledGaussian`) priced by every accountant, add-remove."""
    chosen = accountants(dimension=dimension, batch_clip=batch_clip, delta_split=delta_split)
    return {each.name: each.claim(SampledGaussian(**run), delta) for each in chosen}


def calibrate_rdp(**target: Any) -> Calibration | PaperCalibration:
    """The noise Rényi DP asks for to meet a `target`: proven, more than `certified` needs."""
    return RDP.calibrate(Target(**target))
