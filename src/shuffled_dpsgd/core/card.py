"""The privacy card: what may be claimed about a run, in fixed order and with fixed words.

Certified epsilon first (proven, shuffling credited with nothing), then the paper's estimate
(heuristic, with its c', d and delta split), then audited lower bounds (measured), then the
verdict per claim; then the facts the certified epsilon rests on and how often each was watched, the
threat model, and what nothing here covers. The core computes the certified epsilon and the facts;
estimates, audits and the words about the shuffle are handed in.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from shuffled_dpsgd.core.claim import PrivacyClaim
from shuffled_dpsgd.core.plan import PrivacyPlan
from shuffled_dpsgd.core.referee import Checks

THREAT_MODEL = (
    "the adversary sees the weights after every step and knows the model, the code, the plan and "
    "every record but one; it does not see sampled indices, unnoised gradients, the optimizer's "
    "inputs or the random numbers"
)
NOT_COVERED = (
    "hyper-parameter search: every further run on the same data spends privacy of its own",
    "pre-training data: initial weights are taken as public",
    "training metrics (loss, gradient norms, shares clipped): they are computed from the records "
    "without noise",
    "held-out records: scores, and choices made by them (best checkpoint, early stopping), are "
    "computed from those without noise",
    "the number of records, which the sampling probability and the plan reveal",
    "several records of one person: the unit of protection is one record",
    "side channels: timing, memory, and the lowest bits of floating-point noise",
)
USE_ASSUMPTIONS = (
    "the loss of a record depends on that record and the weights alone, not on its batch",
    "the training data influence the weights through this run only",
)
SMALL_PRINT = (
    "small print: the formula is for noise that it calibrated itself, and says little about other "
    "noise; this noise was not calibrated by it"
)
CERTIFIED_METHOD_NOTE = "shuffling credited with nothing"


@dataclass(frozen=True, kw_only=True)
class AuditedBound:
    """A lower bound on epsilon that an attack demonstrated, at a confidence."""

    adversary: str
    estimator: str
    epsilon: float
    delta: float
    confidence: float

    def describe(self) -> str:
        """One line with the word measured."""
        return (
            f"ε ≥ {self.epsilon:.4g} (measured) by {self.adversary}, {self.estimator}, "
            f"{self.confidence:.0%} confidence, δ = {self.delta:.3g}"
        )


@dataclass(frozen=True, kw_only=True)
class PrivacyCard:
    """Claims, bounds and their conditions; `str(card)` for people, `to_json()` for machines."""

    certified: PrivacyClaim | None
    why_not_certified: tuple[str, ...]
    paper: PrivacyClaim | None
    paper_by_block: Mapping[str, PrivacyClaim]
    audits: tuple[AuditedBound, ...]
    steps_released: int
    steps_planned: int
    target: str
    sampler: str
    mechanism: tuple[str, ...]
    shuffle: str
    randomness: str
    private: bool = True
    shuffles_verified: int = 0
    samples_checked: int = 0
    checks: Checks = field(default_factory=Checks)
    exactness: str | None = None
    accounting: str = "certified"
    subject: Mapping[str, str] = field(default_factory=dict)
    threat_model: str = THREAT_MODEL
    use_assumptions: tuple[str, ...] = USE_ASSUMPTIONS
    not_covered: tuple[str, ...] = NOT_COVERED

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
    def assumptions(self) -> tuple[str, ...]:
        """What the certified claim was priced under, then what the user must see to."""
        priced = () if self.certified is None else self.certified.assumptions
        return (*priced, *self.use_assumptions)

    @property
    def verdicts(self) -> dict[str, str]:
        """Per claim: `claim refuted` when an audited bound exceeds it, else what the audit says."""
        claims = {"certified": self.certified, "paper": self.paper}
        return {name: self._verdict(claim) for name, claim in claims.items() if claim is not None}

    def _verdict(self, claim: PrivacyClaim) -> str:
        if not self.audits:
            return "not audited"
        # A bound at a larger delta also holds at every smaller one, never the other way round.
        comparable = [bound for bound in self.audits if bound.delta >= claim.delta]
        if not comparable:
            return "not audited at this δ"
        strongest = max(comparable, key=lambda bound: bound.epsilon)
        return "claim refuted" if strongest.epsilon > claim.epsilon else "consistent with the audit"

    def to_json(self) -> dict[str, Any]:
        """Plain data in the card's order; every epsilon sits beside its kind."""
        return {
            "subject": dict(self.subject),
            "private": self.private,
            "certified": None if self.certified is None else _claim_json(self.certified),
            "why_not_certified": list(self.why_not_certified),
            "exactness": self.exactness,
            "paper": None if self.paper is None else _claim_json(self.paper),
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

    def __str__(self) -> str:
        lines = [
            f"Privacy card after {self.steps_released} of {self.steps_planned} steps",
            *(line for name, of in self.subject.items() for line in _labelled(name, [of])),
            *_labelled("certified ε", self._certified_lines()),
            *_labelled("paper's estimate", self._paper_lines()),
        ]
        audits = [bound.describe() for bound in self.audits] or ["none run"]
        lines += _labelled("audited bounds", audits)
        verdicts = [f"{name}: {verdict}" for name, verdict in self.verdicts.items()]
        lines += _labelled("verdict", verdicts or ["nothing is claimed"])
        lines += _labelled("target", [self.target])
        lines += _labelled("sampler", [self.sampler])
        lines += _labelled("mechanism", [*self.mechanism, *self.check_lines])
        lines += _labelled("shuffle", self.shuffle_lines)
        lines += _labelled("randomness", [self.randomness])
        lines += _labelled("threat model", [self.threat_model])
        lines += _labelled("assumptions", list(self.assumptions))
        lines += _labelled("not covered", list(self.not_covered))
        return "\n".join(lines)

    def _certified_lines(self) -> list[str]:
        if self.certified is None:
            return [f"{self.no_claim}: {'; '.join(self.why_not_certified)}"]
        line = f"{self.certified.describe()}, {CERTIFIED_METHOD_NOTE}"
        return [line] if self.exactness is None else [line, self.exactness]

    @property
    def no_claim(self) -> str:
        """What stands where a certified epsilon would, if there is none."""
        return "none" if self.private else "none, this run is not private"

    @property
    def check_lines(self) -> list[str]:
        """What was compared with the definition while the run went on."""
        checks = self.checks
        lines = []
        if checks.releases:
            lines.append(
                "compared with plain autograd and with the key: the whole sums of "
                f"{_counted(checks.sums, 'step')}, the norms of "
                f"{_counted(checks.norms, 'sample')}, "
                f"{_counted(checks.noise, 'coordinate')} of the noise; none differed"
            )
        if checks.not_made:
            reasons = "; ".join(sorted(checks.reasons))
            lines.append(f"{_counted(checks.not_made, 'comparison')} could not be made: {reasons}")
        if self.samples_checked:
            lines.append(
                f"{_counted(self.samples_checked, 'sample')} of the first batch and of batches "
                "chosen at random run among other records: none differed from what was clipped"
            )
        return lines

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


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


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


def _labelled(label: str, lines: list[str]) -> list[str]:
    first, *more = lines
    return [f"  {label:<17} {first}", *(f"  {'':<17} {line}" for line in more)]


def _claim_json(claim: PrivacyClaim) -> dict[str, Any]:
    data = claim.to_json()
    return data if math.isfinite(claim.epsilon) else {**data, "epsilon": None}


TARGET_KINDS = {
    "certified": "proven",
    "rdp": "proven, by Rényi DP, which is looser than the certified ε",
    "paper": "heuristic, the paper's estimate",
}
SEEDED_TWICE = (
    "steps were released more than once with different sums: a seeded run draws the same batch "
    "again, and the accountant prices independent draws only"
)
NO_LEDGER = (
    "a seeded run was resumed without its ledger on disk, so nobody knows which noise was used "
    "before on other sums"
)


def write_card(
    plan: PrivacyPlan,
    *,
    num_steps: int,
    checks: Checks | None = None,
    why_not: tuple[str, ...] = (),
    shuffle: str = "off",
    paper: PrivacyClaim | None = None,
    paper_by_block: Mapping[str, PrivacyClaim] | None = None,
    exactness: str | None = None,
    shuffles_verified: int = 0,
    samples_checked: int = 0,
) -> PrivacyCard:
    """The card of a run that made `num_steps` releases under `plan`.

    `why_not` are reasons of the run, besides those of the plan, that no epsilon can be certified.
    """
    reasons = (*plan.uncertifiable, *why_not)
    return PrivacyCard(
        certified=None if reasons else plan.certified(num_steps),
        why_not_certified=reasons,
        paper=paper,
        paper_by_block=paper_by_block or {},
        audits=(),
        steps_released=num_steps,
        steps_planned=plan.num_steps,
        target=_target(plan),
        accounting=plan.accounting,
        sampler=_sampler(plan),
        mechanism=tuple(_mechanism(plan)),
        shuffle=shuffle,
        randomness=_randomness(plan),
        private=is_private(plan),
        shuffles_verified=shuffles_verified,
        samples_checked=samples_checked,
        checks=checks or Checks(),
        exactness=None if reasons or num_steps == 0 else exactness,
        not_covered=(*NOT_COVERED, *_large_delta(plan)),
    )


def is_private(plan: PrivacyPlan) -> bool:
    """Whether noise hides every record at all: it must be there, and gradients bounded."""
    return plan.bounds_samples and plan.smallest_noise_multiplier > 0.0


def _target(plan: PrivacyPlan) -> str:
    if plan.epsilon is None:
        return "none: the noise multiplier was given"
    kind = TARGET_KINDS[plan.accounting]
    return f"ε = {plan.epsilon:g} ({kind}) at δ = {plan.delta:.3g} over {plan.num_steps} steps"


def _sampler(plan: PrivacyPlan) -> str:
    if plan.sampling != "poisson":
        return "the user's own batches, unaccounted"
    return (
        f"Poisson, every record joins each batch with probability {plan.sampling_prob:.6g} "
        f"(expected batch {plan.expected_batch_size} of {plan.dataset_size}); "
        f"adjacency {plan.adjacency}"
    )


def _mechanism(plan: PrivacyPlan) -> list[str]:
    clip = f"per-sample clip {plan.clip} at {plan.clip_norm:g} over all trainable parameters"
    lines = [clip if plan.bounds_samples else "no per-sample clip"]
    for block in plan.blocks:
        bound = block.batch_clip_norm
        batch = "no batch clip" if bound is None else f"batch clip {bound:g}"
        lines.append(
            f"block {block.name}: {block.dimension} coordinates, noise multiplier "
            f"{block.noise_multiplier:.6g}, {batch}"
        )
    if plan.falls_back:
        lines.append("Algorithm 1 fell back to plain DP-SGD: shuffling would need more noise")
    return lines


def _large_delta(plan: PrivacyPlan) -> tuple[str, ...]:
    """What a delta of 1/N or more allows: publishing a record chosen at random meets it."""
    if plan.delta * plan.dataset_size < 1.0:
        return ()
    return (
        f"every single record: δ = {plan.delta:.3g} is not below 1/{plan.dataset_size}, and a "
        "mechanism that publishes one record drawn at random meets such a δ",
    )


def _randomness(plan: PrivacyPlan) -> str:
    if plan.secure:
        return (
            "ChaCha20, keyed by the operating system anew for every release; the key is kept "
            "nowhere, and without it the noise cannot be computed"
        )
    return (
        "ChaCha20, keyed by a seed: whoever learns the seed can remove the noise, so every claim "
        "assumes that it is secret and used for no other run; a step that is released again with "
        "other sums has other noise"
    )
