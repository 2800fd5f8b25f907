"""Claims held against audited bounds: data, and the one rule that decides.

A claim is refuted at 95 % when a bound that may refute it exceeds it, with the error level divided
among all such bounds (Bonferroni): a table of many adversaries must not refute by its size. Every
single bound is also reported at its own 95 %.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol

from shuffled_dpsgd.auditing.estimators import ClopperPearson, OrderStatistics
from shuffled_dpsgd.auditing.estimators.curves import Area, RateAt, tpr_at_fpr
from shuffled_dpsgd.auditing.estimators.order_statistics import composed_epsilon
from shuffled_dpsgd.auditing.estimators.scores import EstimatedBound, Inclusion, ScorePair
from shuffled_dpsgd.auditing.reach import Reach
from shuffled_dpsgd.core.claim import PrivacyClaim
from shuffled_dpsgd.errors import require

if TYPE_CHECKING:
    from shuffled_dpsgd.training.card import PrivacyCard


LOW_RATES = (0.01, 0.001)
GAUSSIAN = OrderStatistics(family="gaussian")
ESTIMATORS = (ClopperPearson(), OrderStatistics(), GAUSSIAN)
"""What reads scores of one step."""


class ThreatModel(enum.Enum):
    """What the adversary sees. Each includes all that comes after it."""

    MECHANISM_OUTPUT = "noisy sums"

    STEP_GRADIENTS = "step gradients"
    ITERATES = "iterates"
    FINAL_WITH_INITIAL = "final weights, initial weights known"
    FINAL_WITHOUT_INITIAL = "final weights, initial weights unknown"
    BLACK_BOX = "black box"


class Estimator(Protocol):
    """Draws a bound from scores of the kind that it reads: of two worlds, or of one run."""

    @property
    def name(self) -> str: ...

    @property
    def reads(self) -> type: ...

    def lower_bound(self, scores: Any, *, delta: float, confidence: float) -> EstimatedBound: ...


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What one adversary got out of one canary under one threat model.

    `closed_form` is the exact ε of the two worlds, at the audit's δ, where the score is known to be
    Gaussian in both. Bounds from scores stay below it, capped by the size of the sample.
    `assumptions` are those under which the scores are what the estimators take them for.
    """

    adversary: str
    canary: str
    threat_model: ThreatModel
    scores: ScorePair | Inclusion
    closed_form: float | None = None
    assumptions: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Attack:
    """Evidence with its bounds: each at the stated confidence, and the joint ones for verdicts."""

    evidence: Evidence
    bounds: tuple[EstimatedBound, ...]
    joint: tuple[EstimatedBound, ...]

    @property
    def label(self) -> str:
        return f"{self.evidence.adversary} ({self.evidence.canary})"

    def strongest_against(self, claim: PrivacyClaim) -> float:
        """Largest joint bound that may refute `claim`; below zero where none may."""
        return max((b.epsilon for b in self.joint if b.refutes_such(claim)), default=-1.0)

    @property
    def true_positive_rates(self) -> dict[float, RateAt]:
        """TPR at low FPR (Carlini et al. 2022); empty for the canaries of one run."""
        scores = self.evidence.scores
        if not isinstance(scores, ScorePair) or self.evidence.assumptions:
            return {}
        return {rate: tpr_at_fpr(scores, rate) for rate in LOW_RATES}

    def to_json(self) -> dict[str, Any]:
        return {
            "adversary": self.evidence.adversary,
            "canary": self.evidence.canary,
            "threat_model": self.evidence.threat_model.value,
            "assumptions": list(self.evidence.assumptions),
            "closed_form": None
            if self.evidence.closed_form is None
            else {"epsilon": self.evidence.closed_form, "kind": "proven"},
            "bounds": {bound.method: bound.to_json() for bound in self.bounds},
            "joint_bounds": {bound.method: bound.to_json() for bound in self.joint},
            "tpr_at_fpr": {
                str(rate): asdict(found) for rate, found in self.true_positive_rates.items()
            },
        }


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Whether a claim survived, and the attack that came closest."""

    claim: PrivacyClaim
    refuted: bool
    confidence: float
    strongest_bound: float
    strongest_attack: str

    @property
    def outcome(self) -> str:
        return f"refuted at {100 * self.confidence:g} %" if self.refuted else "consistent"

    def to_json(self) -> dict[str, Any]:
        kept = {name: getattr(self, name) for name in ("strongest_bound", "strongest_attack")}
        return {"claim": self.claim.to_json(), "outcome": self.outcome, **kept}


@dataclass(frozen=True, kw_only=True)
class Membership:
    """Areas under the ROC curve of the loss attack on `num_records` planted records.

    Both runs start from the same weights and train on the same records, in the same batches, for as
    many steps; one clips and adds noise, the other does neither. Whether a record was in is decided
    by a fair coin, the same in both, so guessing has an area of one half. `without_privacy` is None
    where the target does not say how to train without.
    """

    canary: str
    num_records: int
    with_privacy: Area
    without_privacy: Area | None

    def rows(self) -> list[tuple[str, str]]:
        """Name and value of each area, for tables."""
        areas = {"with": self.with_privacy, "without": self.without_privacy}
        return [(f"trained {n} privacy", str(a)) for n, a in areas.items() if a is not None]

    def to_json(self) -> dict[str, Any]:
        areas = {"with_privacy": self.with_privacy, "without_privacy": self.without_privacy}
        return {
            "attack": "area under the ROC curve of the loss",
            "canary": self.canary,
            "num_records": self.num_records,
            **{n: a and {**asdict(a), "kind": "measured"} for n, a in areas.items()},
        }


@dataclass(frozen=True, kw_only=True)
class AuditReport:
    """One audit: what was audited, which claims were on trial, what was found."""

    unit: str
    setting: Mapping[str, Any]
    claims: tuple[PrivacyClaim, ...]
    attacks: tuple[Attack, ...]
    verdicts: tuple[Verdict, ...]
    seconds: float
    notes: tuple[str, ...] = ()
    card: PrivacyCard | None = None
    reach: Reach | None = None
    membership: Membership | None = None

    @property
    def refutes_a_proven_claim(self) -> bool:
        """True means a bug of ours, since a theorem cannot be refuted."""
        return any(v.refuted and v.claim.kind == "proven" for v in self.verdicts)

    def to_json(self) -> dict[str, Any]:
        return {
            "unit": self.unit,
            "setting": dict(self.setting),
            "claims": [claim.to_json() for claim in self.claims],
            "attacks": [attack.to_json() for attack in self.attacks],
            "verdicts": [verdict.to_json() for verdict in self.verdicts],
            "seconds": self.seconds,
            "notes": list(self.notes),
            "card": self.card and self.card.to_json(),
            "reach": self.reach and self.reach.to_json(),
            "membership": self.membership and self.membership.to_json(),
        }


def assess(
    evidence: Sequence[Evidence],
    estimators: Sequence[Estimator],
    *,
    delta: float,
    confidence: float = 0.95,
) -> tuple[Attack, ...]:
    """Every estimator on all evidence that it reads, at the stated and at the joint level."""
    fitting = [[e for e in estimators if isinstance(item.scores, e.reads)] for item in evidence]
    comparisons = sum(map(len, fitting))
    joint_confidence = 1.0 - (1.0 - confidence) / max(comparisons, 1)

    def bounds(item: Evidence, those: Sequence[Estimator], at: float) -> tuple[EstimatedBound, ...]:
        return tuple(e.lower_bound(item.scores, delta=delta, confidence=at) for e in those)

    return tuple(
        Attack(
            evidence=item,
            bounds=bounds(item, those, confidence),
            joint=bounds(item, those, joint_confidence),
        )
        for item, those in zip(evidence, fitting, strict=True)
    )


def judge(
    claims: Sequence[PrivacyClaim], attacks: Sequence[Attack], *, confidence: float = 0.95
) -> tuple[Verdict, ...]:
    """One verdict per claim; the bounds must have been drawn at the claim's own δ."""
    verdicts = []
    for claim in claims:
        deltas = {bound.delta for attack in attacks for bound in attack.joint}
        expected = f"the δ of the bounds, {sorted(deltas)}"
        require(deltas <= {claim.delta}, "claims", expected, claim.delta)
        bounds = [attack.strongest_against(claim) for attack in attacks]
        strongest = max(bounds, default=-1.0)
        verdicts.append(
            Verdict(
                claim=claim,
                refuted=strongest > claim.epsilon,
                confidence=confidence,
                strongest_bound=max(strongest, 0.0),
                strongest_attack=attacks[bounds.index(strongest)].label if bounds else "nobody",
            )
        )
    return tuple(verdicts)


def report_on(
    evidence: Sequence[Evidence],
    estimators: Sequence[Estimator],
    *,
    unit: str,
    setting: Mapping[str, Any],
    claims: tuple[PrivacyClaim, ...],
    confidence: float,
    started: float,
    notes: tuple[str, ...] = (),
) -> AuditReport:
    """Assess and judge what was read since `started`, by the performance counter."""
    attacks = assess(evidence, estimators, delta=claims[0].delta, confidence=confidence)
    return AuditReport(
        unit=unit,
        setting=setting,
        claims=claims,
        attacks=attacks,
        verdicts=judge(claims, attacks, confidence=confidence),
        seconds=time.perf_counter() - started,
        notes=notes,
    )


def check_fields(setting: object, *positive: str, **least: int) -> None:
    """Refuse fields of an audit's setting that are not positive or below a limit; nan is either."""
    for name in positive:
        require(getattr(setting, name) > 0.0, name, "a positive number", getattr(setting, name))
    for name, limit in least.items():
        require(getattr(setting, name) >= limit, name, f"at least {limit}", getattr(setting, name))


def composition_note(
    attacks: Sequence[Attack], *, sampling_prob: float, num_steps: int, delta: float
) -> str:
    """What the largest measured μ of a step amounts to over a run of sampled steps.

    Holds if every step is Gaussian, as the certified claim has it; it refutes nothing else.
    """
    mus = [
        float(bound.counts["mu"])
        for attack in attacks
        for bound in attack.joint
        if bound.method == GAUSSIAN.name
    ]
    mu = max(mus, default=0.0)
    epsilon = composed_epsilon(mu, sampling_prob=sampling_prob, num_steps=num_steps, delta=delta)
    return (
        f"μ ≥ {mu:.3f} of a step, composed over {num_steps} steps sampled at "
        f"{sampling_prob:.4g}: ε ≥ {epsilon:.4g} (measured, if every step is Gaussian) "
        f"at δ = {delta:.3g}"
    )
