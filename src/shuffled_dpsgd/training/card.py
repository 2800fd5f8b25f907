"""The privacy card: what may be claimed about a run, in fixed order and with fixed words.

Certified epsilon first (proven, shuffling credited with nothing), then the paper's estimate
(heuristic, with its c', d and delta split), then audited lower bounds (measured), then the
verdict per claim; then the facts of the core's card and what moves.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from shuffled_dpsgd.accounting import Meaning, what_it_means
from shuffled_dpsgd.accounting.bracket import STATEMENT, is_exact
from shuffled_dpsgd.accounting.together import claim_together, runs_of
from shuffled_dpsgd.core import card as core_card
from shuffled_dpsgd.core.card import THREAT_MODEL, CertifiedCard, counted
from shuffled_dpsgd.core.claim import PrivacyClaim
from shuffled_dpsgd.core.plan import PrivacyPlan
from shuffled_dpsgd.core.referee import Checks
from shuffled_dpsgd.permutation import PermutationSpec
from shuffled_dpsgd.training.moving_clip import follows
from shuffled_dpsgd.training.planning import plan_json
from shuffled_dpsgd.training.spending import paper_by_block, paper_estimate

PAPER, AUDITED, REFUTED = "paper's estimate", "audited bounds", "claim refuted"
# A line of the subject, for a model whose weights were changed after the release.
NOT_ABOUT = "not about"
SMALL_PRINT = (
    "small print: the formula is for noise that it calibrated itself, and says little about other "
    "noise; this noise was not calibrated by it"
)

UNIT_THREAT_MODEL = THREAT_MODEL.replace("every record but one", "every unit but one")
NUMBER_SETTLED = "this number of steps was fixed in advance"


class SpentSoFar(PrivacyClaim):
    """The ε of the steps taken so far; a claim only if their number was fixed beforehand."""

    def __format__(self, spec: str) -> str:
        kind = f"({self.kind})"
        return super().__format__(spec).replace(kind, f"{kind[:-1]} only if {NUMBER_SETTLED})")


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
    # As `plan_json` writes it, without the seed: what everything above follows from.
    plan: Mapping[str, Any] = field(default_factory=dict)
    # Digests of what was released, by which saved weights are known; see `released_weights.py`.
    weights: Mapping[str, Sequence[str]] = field(default_factory=dict)

    __str__ = CertifiedCard.__str__

    def with_audits(self, *bounds: AuditedBound) -> PrivacyCard:
        """The same card with audited bounds added; verdicts follow from them."""
        return replace(self, audits=(*self.audits, *bounds))

    def about(self, **subject: str) -> PrivacyCard:
        """The same card with its subject: model, data set, date, versions, a hash of the weights.

        Only what is public: names as given by the user, and a hash of the released weights.
        """
        return replace(self, subject={**self.subject, **subject})

    def epsilon(self, delta: float, *, so_far: bool = False) -> PrivacyClaim:
        """The certified ε at any δ: of the plan, or `so_far` of as many steps as were taken.

        Infinite, which claims nothing, where none can be certified.
        """
        claim = (self.certified_so_far if so_far else None) or self.certified
        if claim is None:
            why = f"no accountant: {'; '.join(self.why_not_certified)}"
            return PrivacyClaim(epsilon=math.inf, delta=delta, method=why, kind="proven")
        runs = runs_of(claim)
        found = claim_together(runs, delta) if runs else replace(claim, delta=delta)
        if claim is not self.certified_so_far:
            return found
        return SpentSoFar(**vars(found) | {"assumptions": (*found.assumptions, NUMBER_SETTLED)})

    @property
    def meaning(self) -> Meaning | None:
        """What the certified ε means to people, for the whole plan; None where there is no claim.

        Computed when it is first asked for.
        """
        if self.certified is None or not (runs := runs_of(self.certified)):
            return None
        return what_it_means(runs, self.certified.delta, "unit" if self.of_units else "record")

    @property
    def of_units(self) -> bool:
        """Whether it is about units of several records."""
        return "every unit joins" in self.sampler

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
        return REFUTED if strongest.epsilon > claim.epsilon else "consistent with the audit"

    def to_json(self) -> dict[str, Any]:
        """Plain data in the card's order; every epsilon sits beside its kind."""
        return {
            "subject": dict(self.subject),
            "weights": {kind: list(digests) for kind, digests in self.weights.items()},
            "plan": dict(self.plan),
            "private": self.private,
            "accounting": self.accounting,
            "certified": _claim_json(self.certified),
            "certified_so_far": _claim_json(self.certified_so_far),
            "why_not_certified": list(self.why_not_certified),
            "exactness": self.exactness,
            "meaning": None if self.meaning is None else self.meaning.to_json(),
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
            *([] if self.meaning is None else [("what it means", list(self.meaning.describe()))]),
            (PAPER, self._paper_lines()),
            (AUDITED, audits or ["none run"]),
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
            return ["none: the formula needs uncut Poisson batches, a clip and independent noise"]
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
    """The inputs that decide the paper's claim: c', d and the split of δ; empty if none."""
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


def write_card(
    plan: PrivacyPlan,
    *,
    num_steps: int,
    spec: PermutationSpec | None = None,
    released: bool = True,
    shuffles_verified: int = 0,
    samples_checked: int = 0,
    checks: Checks | None = None,
    why_not: tuple[str, ...] = (),
    not_checked: tuple[str, ...] = (),
    shows_sums: bool = False,
) -> PrivacyCard:
    """The card of a run that made `num_steps` releases under `plan`.

    `released` says whether a shuffle planned for the release has happened. `shuffles_verified`
    counts the shuffles before and after which the model's outputs were compared. `samples_checked`
    counts the samples whose clipped gradient was compared with the one they have among other
    records; that number must not depend on the records. `not_checked` are assumptions that were not
    tested. `shows_sums` says whether every sum can be computed from the released weights; if not,
    the card does not say that the certified ε is attained.
    """
    # No run attains the ε of a largest batch, nor that of a clip that follows the norms.
    tight = plan.largest_batch is None and plan.clip_quantile is None and plan.bands == 1
    covered = tight and num_steps == plan.num_steps and not (plan.uncertifiable or why_not)
    found = core_card.write_card(
        plan,
        PrivacyCard,
        num_steps=num_steps,
        checks=checks,
        why_not=why_not,
        shuffle=_shuffle(plan, spec, released=released),
        paper=paper_estimate(plan, num_steps and plan.num_steps),
        paper_by_block=paper_by_block(plan, num_steps and plan.num_steps),
        exactness=_exactness(plan, shows_sums) if covered else None,
        accounting=plan.accounting,
        shuffles_verified=shuffles_verified,
        samples_checked=samples_checked,
    )
    mechanism = (*found.mechanism, *([] if plan.clip_quantile is None else [follows(plan)]))
    assumptions = (*found.use_assumptions, *not_checked)
    model = UNIT_THREAT_MODEL if found.of_units else THREAT_MODEL
    return replace(
        found,
        mechanism=mechanism,
        use_assumptions=assumptions,
        threat_model=model,
        plan=plan_json(plan),
    )


def _shuffle(plan: PrivacyPlan, spec: PermutationSpec | None, *, released: bool) -> str:
    if not plan.permutes or spec is None:
        return "off" if plan.shuffle == "off" else "off (fallback)"
    pending = " (not yet applied)" if plan.shuffle == "at-release" and not released else ""
    return (
        f"{plan.shuffle}{pending}, scope {plan.scope}: "
        f"{spec.moved_parameters} of {spec.total_parameters} "
        f"parameters live in tensors that move, {power_of_ten(spec.log10_group_order)} permutations"
    )


def _exactness(plan: PrivacyPlan, shows_sums: bool) -> str | None:
    """That the certified epsilon is attained, where the proposition covers the run."""
    least = min(plan.blocks, key=lambda block: block.noise_multiplier)
    covered = is_exact(
        clip=plan.clip,
        clip_norm=plan.clip_norm,
        batch_clip_norm=least.batch_clip_norm,
        adjacency=plan.adjacency,
        shows_sums=shows_sums,
    )
    return STATEMENT if covered else None


def power_of_ten(exponent: float) -> str:
    """Ten to the rounded exponent, as it is printed.

    >>> power_of_ten(224.3)
    '10²²⁴'
    """
    return "10" + f"{exponent:.0f}".translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
