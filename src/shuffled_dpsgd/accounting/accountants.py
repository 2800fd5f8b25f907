"""Every accountant behind one interface, and the table that sets them side by side.

An accountant prices a `SampledGaussian` or refuses; `tests/conformance` holds all of them to the
same rules. `certified` is the one to rely on; `paper` is an estimate; the others are what the
paper compares itself with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from shuffled_dpsgd.accounting.calibration import (
    Calibration,
    calibrate_certified,
    check_epsilon,
    smallest_noise_multiplier,
)
from shuffled_dpsgd.accounting.comparisons import advanced_composition_epsilon, gdp_epsilon
from shuffled_dpsgd.accounting.paper import (
    DeltaSplit,
    PaperCalibration,
    calibrate_paper,
    paper_claim,
)
from shuffled_dpsgd.accounting.rdp import rdp_epsilon
from shuffled_dpsgd.core.certified import ASSUMPTIONS, certified_claim
from shuffled_dpsgd.core.claim import Adjacency, Kind, PrivacyClaim
from shuffled_dpsgd.core.events import SampledGaussian, check_delta
from shuffled_dpsgd.errors import InvalidArgumentError


@dataclass(frozen=True, kw_only=True)
class Target:
    """What a calibration must meet: a budget for a run whose noise is still open."""

    epsilon: float
    delta: float
    sampling_prob: float
    num_steps: int
    adjacency: Adjacency = "add-remove"

    def __post_init__(self) -> None:
        check_epsilon(self.epsilon)
        check_delta(self.delta)
        self.mechanism(1.0)

    def mechanism(self, noise_multiplier: float) -> SampledGaussian:
        """The run with this much noise."""
        return SampledGaussian(
            noise_multiplier=noise_multiplier,
            sampling_prob=self.sampling_prob,
            num_steps=self.num_steps,
            adjacency=self.adjacency,
        )


class Accountant(Protocol):
    """Prices a mechanism, and finds the noise for a price; refuses adjacencies it cannot price."""

    @property
    def name(self) -> str: ...

    @property
    def kind(self) -> Kind: ...

    @property
    def adjacencies(self) -> tuple[Adjacency, ...]: ...

    def claim(self, mechanism: SampledGaussian, delta: float) -> PrivacyClaim: ...

    def calibrate(self, target: Target) -> Calibration | PaperCalibration: ...


@dataclass(frozen=True, kw_only=True)
class CertifiedAccountant:
    """Privacy-loss distributions, pessimistic: see `certified`."""

    name: str = "certified"
    kind: Kind = "proven"
    adjacencies: tuple[Adjacency, ...] = ("add-remove", "replace-one")

    def claim(self, mechanism: SampledGaussian, delta: float) -> PrivacyClaim:
        return certified_claim(**mechanism.to_json(), delta=delta)

    def calibrate(self, target: Target) -> Calibration:
        return calibrate_certified(
            epsilon=target.epsilon,
            delta=target.delta,
            sampling_prob=target.sampling_prob,
            num_steps=target.num_steps,
            adjacency=target.adjacency,
        )


@dataclass(frozen=True, kw_only=True)
class FormulaAccountant:
    """An accountant given by one function (mechanism, δ) -> ε, decreasing in the noise."""

    name: str
    kind: Kind
    method: str
    formula: Callable[[SampledGaussian, float], float]
    note: str
    adjacencies: tuple[Adjacency, ...] = ("add-remove",)

    def claim(self, mechanism: SampledGaussian, delta: float) -> PrivacyClaim:
        check_delta(delta)
        _check_adjacency(self, mechanism.adjacency)
        return PrivacyClaim(
            epsilon=self.formula(mechanism, delta),
            delta=delta,
            method=self.method,
            kind=self.kind,
            assumptions=(*ASSUMPTIONS, self.note),
            inputs=mechanism.to_json(),
        )

    def calibrate(self, target: Target) -> Calibration:
        _check_adjacency(self, target.adjacency)

        def pricing(sigma: float) -> float:
            return self.formula(target.mechanism(sigma), target.delta)

        noise = smallest_noise_multiplier(
            target.epsilon, coarse=pricing, fine=pricing, guess=1.0 + 1.0 / target.epsilon
        )
        claim = self.claim(target.mechanism(noise), target.delta)
        return Calibration(noise_multiplier=noise, claim=claim)


@dataclass(frozen=True, kw_only=True)
class PaperAccountant:
    """The paper's estimate for one dimension and batch clip: see `paper`."""

    dimension: int
    batch_clip: float
    delta_split: DeltaSplit = 0.5
    name: str = "paper"
    kind: Kind = "heuristic"
    adjacencies: tuple[Adjacency, ...] = ("add-remove",)

    def claim(self, mechanism: SampledGaussian, delta: float) -> PrivacyClaim:
        _check_adjacency(self, mechanism.adjacency)
        return paper_claim(
            noise_multiplier=mechanism.noise_multiplier,
            sampling_prob=mechanism.sampling_prob,
            num_steps=mechanism.num_steps,
            delta=delta,
            dimension=self.dimension,
            batch_clip=self.batch_clip,
            delta_split=self.delta_split,
        )

    def calibrate(self, target: Target) -> PaperCalibration:
        _check_adjacency(self, target.adjacency)
        return calibrate_paper(
            epsilon=target.epsilon,
            delta=target.delta,
            sampling_prob=target.sampling_prob,
            num_steps=target.num_steps,
            dimension=self.dimension,
            batch_clip=self.batch_clip,
            delta_split=self.delta_split,
        )


STANDARD: tuple[Accountant, ...] = (
    CertifiedAccountant(),
    FormulaAccountant(
        name="rdp",
        kind="proven",
        method="Rényi DP",
        formula=rdp_epsilon,
        note="proven but loose: moments at a finite set of orders",
    ),
    FormulaAccountant(
        name="gdp",
        kind="heuristic",
        method="Gaussian DP, central limit",
        formula=gdp_epsilon,
        note="approximate: the central limit theorem bounds epsilon in neither direction",
    ),
    FormulaAccountant(
        name="advanced_composition",
        kind="proven",
        method="advanced composition, d = 1",
        formula=advanced_composition_epsilon,
        note="the exact Gaussian, sampled and composed (Steinke 2022, Thms. 22 and 29)",
    ),
)


def accountants(
    *,
    dimension: int | None = None,
    batch_clip: float | None = None,
    delta_split: DeltaSplit = 0.5,
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
    paper = PaperAccountant(dimension=dimension, batch_clip=batch_clip, delta_split=delta_split)
    return (*STANDARD, paper)


def compare(
    *,
    noise_multiplier: float,
    sampling_prob: float,
    num_steps: int,
    delta: float,
    dimension: int | None = None,
    batch_clip: float | None = None,
    delta_split: DeltaSplit = 0.5,
) -> dict[str, PrivacyClaim]:
    """One run priced by every accountant, add-remove adjacency."""
    mechanism = SampledGaussian(
        noise_multiplier=noise_multiplier, sampling_prob=sampling_prob, num_steps=num_steps
    )
    chosen = accountants(dimension=dimension, batch_clip=batch_clip, delta_split=delta_split)
    return {each.name: each.claim(mechanism, delta) for each in chosen}


def compare_calibrations(
    *,
    epsilon: float,
    delta: float,
    sampling_prob: float,
    num_steps: int,
    dimension: int | None = None,
    batch_clip: float | None = None,
    delta_split: DeltaSplit = 0.5,
) -> dict[str, Calibration | PaperCalibration]:
    """The noise every accountant asks for to meet `epsilon`, add-remove adjacency."""
    target = Target(epsilon=epsilon, delta=delta, sampling_prob=sampling_prob, num_steps=num_steps)
    chosen = accountants(dimension=dimension, batch_clip=batch_clip, delta_split=delta_split)
    return {each.name: each.calibrate(target) for each in chosen}


def calibrate_rdp(
    *,
    epsilon: float,
    delta: float,
    sampling_prob: float,
    num_steps: int,
    adjacency: Adjacency = "add-remove",
) -> Calibration:
    """The noise Rényi DP asks for to meet `epsilon`: proven, more than `certified` needs."""
    rdp = next(each for each in STANDARD if each.name == "rdp")
    found = rdp.calibrate(
        Target(
            epsilon=epsilon,
            delta=delta,
            sampling_prob=sampling_prob,
            num_steps=num_steps,
            adjacency=adjacency,
        )
    )
    assert isinstance(found, Calibration)
    return found


def _check_adjacency(accountant: Accountant, adjacency: Adjacency) -> None:
    if adjacency not in accountant.adjacencies:
        raise InvalidArgumentError(
            "adjacency",
            expected=f"one of {accountant.adjacencies} for {accountant.name}",
            got=adjacency,
            remedy="use the certified accountant for it",
        )
