"""The privacy card: what may be claimed about a run, in fixed order and with fixed words.

Certified epsilon first (proven, shuffling credited with nothing), then the paper's estimate
(heuristic, with its c', d and delta split), then audited lower bounds (measured), then the
verdict per claim; then the facts of the core's card and what moves.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from shuffled_dpsgd.core.card import CertifiedCard, counted
from shuffled_dpsgd.core.claim import PrivacyClaim

SMALL_PRINT = (
    "small print: the formula is for noise that it calibrated itself, and says little about other "
    "noise; this noise was not calibrated by it"
)


@dataclass(frozen=True, kw_only=True)
class AuditedBound:
    """A lower bound on epsilon that an attack demonstrated, at a confidence.

    With `tests_noise` it bounds the noise of the certified mechanism, and so speaks about the
    certified claim alone.
    """

    adversary: str
    estimator: str
    epsilon: float
    delta: float
    confidence: float
    tests_noise: bool = False

    def describe(self) -> str:
        """One line with the word measured."""
        provided = ", if every step is Gaussian" if self.tests_noise else ""
        return (
            f"ε ≥ {self.epsilon:.4g} (measured{provided}) by {self.adversary}, {self.estimator}, "
            f"{self.confidence:.0%} confidence, δ = {self.delta:.3g}"
        )


@dataclass(frozen=True, kw_only=True)
class PrivacyCard(CertifiedCard):
    """Claims, bounds and their conditions; `str(card)` for people, `to_json()` for machines."""

    paper: PrivacyClaim | None
    paper_by_block: Mapping[str, PrivacyClaim]
    shuffle: str
    audits: tuple[AuditedBound, ...] = ()
    shuffles_verified: int = 0
    samples_checked: int = 0
    exactness: str | None = None
    accounting: str = "certified"
    subject: Mapping[str, str] = field(default_factory=dict)

    __str__ = CertifiedCard.__str__

    def with_audits(self, *bounds: AuditedBound) -> PrivacyCard:
        """The same card with audited bounds added; verdicts follow from them."""
        return replace(self, audits=(*self.audits, *bounds))

    def about(self, **subject: str) -> PrivacyCard:
        """The same card with whose it is: a model, a data set, a date, versions, a hash.

        Only what is public: names as they were given, and a hash of weights that were released.
        """
        return replace(self, subject={**self.subject, **subject})

    @property
    def paper_is_small_print(self) -> bool:
        """Whether the noise was not calibrated by the paper's formula, which then only compares."""
        return self.accounting != "paper"

    @property
    def verdicts(self) -> dict[str, str]:
        """Per claim: `claim refuted` when an audited bound exceeds it, else what the audit says."""
        claims = {"certified": self.certified, "paper": self.paper}
        return {name: self._verdict(claim) for name, claim in claims.items() if claim is not None}

    def _verdict(self, claim: PrivacyClaim) -> str:
        if not self.audits:
            return "not audited"
        # A bound at a larger delta also holds at every smaller one, never the other way round.
        comparable = [
            bound
            for bound in self.audits
            if bound.delta >= claim.delta and (claim.kind == "proven" or not bound.tests_noise)
        ]
        if not comparable:
            return "not audited at this δ"
        strongest = max(comparable, key=lambda bound: bound.epsilon)
        return "claim refuted" if strongest.epsilon > claim.epsilon else "consistent with the audit"

    def to_json(self) -> dict[str, Any]:
        """Plain data in the card's order; every epsilon sits beside its kind."""
        return {
            "subject": dict(self.subject),
            "private": self.private,
            "certified": _claim_json(self.certified),
            "certified_so_far": _claim_json(self.certified_so_far),
            "why_not_certified": list(self.why_not_certified),
            "exactness": self.exactness,
            "paper": _claim_json(self.paper),
            "paper_by_block": {n: _claim_json(c) for n, c in self.paper_by_block.items()},
            "audits": [{**asdict(bound), "kind": "measured"} for bound in self.audits],
            "verdicts": self.verdicts,
            "steps_released": self.steps_released,
            "steps_planned": self.steps_planned,
            "target": self.target,
            "sampler": self.sampler,
            "mechanism": list(self.mechanism),
            "shuffle": self.shuffle,
            "shuffles_verified": self.shuffles_verified,
            "samples_checked": self.samples_checked,
            "checks": {**asdict(self.checks), "reasons": sorted(self.checks.reasons)},
            "randomness": self.randomness,
            "threat_model": self.threat_model,
            "assumptions": list(self.assumptions),
            "not_covered": list(self.not_covered),
        }

    def dumps(self) -> str:
        """The card as a JSON document."""
        return json.dumps(self.to_json(), indent=2, ensure_ascii=False, allow_nan=False)

    def sections(self) -> list[tuple[str, list[str]]]:
        """Every label of the card with its lines, in order."""
        certified, *facts = super().sections()
        place = [label for label, _ in facts].index("randomness")
        audits = [bound.describe() for bound in self.audits]
        verdicts = [f"{name}: {verdict}" for name, verdict in self.verdicts.items()]
        return [
            *((name, [of]) for name, of in self.subject.items()),
            certified,
            ("paper's estimate", self._paper_lines()),
            ("audited bounds", audits or ["none run"]),
            ("verdict", verdicts or ["nothing is claimed"]),
            *facts[:place],
            ("shuffle", self.shuffle_lines),
            *facts[place:],
        ]

    @property
    def certified_lines(self) -> list[str]:
        """The certified claim, or why there is none, and whether it is attained."""
        first, *more = super().certified_lines
        shown = self.certified is not None and self.exactness is not None
        return [first, *([self.exactness or ""] if shown else []), *more]

    @property
    def check_lines(self) -> list[str]:
        """What was compared with the definition, and with the samples alone."""
        if not self.samples_checked:
            return super().check_lines
        return [
            *super().check_lines,
            f"{counted(self.samples_checked, 'sample')} of the first batch and of batches chosen "
            "at random run among other records: none differed from what was clipped",
        ]

    @property
    def shuffle_lines(self) -> list[str]:
        """What moves, and how often the model's outputs were compared before and after."""
        if not self.shuffles_verified:
            return [self.shuffle]
        count = f"{self.shuffles_verified} time{'' if self.shuffles_verified == 1 else 's'}"
        return [self.shuffle, f"outputs compared before and after {count}: never changed"]

    def _paper_lines(self) -> list[str]:
        if self.paper is None:
            return ["none: the formula needs Poisson sampling, a clip and noise"]
        lines = [f"{_with_inputs(self.paper)}; not a guarantee"]
        if self.paper_is_small_print:
            lines.append(SMALL_PRINT)
        if len({claim.epsilon for claim in self.paper_by_block.values()}) > 1:
            lines += [
                f"block {name} alone: {_with_inputs(claim)}"
                for name, claim in self.paper_by_block.items()
            ]
        return lines


def _with_inputs(claim: PrivacyClaim) -> str:
    decided = paper_inputs(claim)
    return f"{claim.describe()}, with {decided}" if decided else claim.describe()


def paper_inputs(claim: PrivacyClaim) -> str:
    """What decides a paper's claim: c', d and the split of delta; empty where it has none."""
    inputs = claim.inputs
    if "dimension" not in inputs:
        return ""
    if inputs["dimension"] == 1:
        decided = "d = 1 (the unshuffled mechanism)"
    else:
        decided = f"c' = {inputs['batch_clip']:g} c, d = {inputs['dimension']:,}"
    return f"{decided}, δ split {inputs['delta_split']:g}"


def _claim_json(claim: PrivacyClaim | None) -> dict[str, Any] | None:
    if claim is None:
        return None
    data = claim.to_json()
    return data if math.isfinite(claim.epsilon) else {**data, "epsilon": None}
