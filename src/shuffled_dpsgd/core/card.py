"""The certified card: the proven epsilon, the facts it rests on, and how often each was watched.

In fixed order and with fixed words: the claim, then the facts, the threat model, and what nothing
here covers. The card a user sees adds the paper's estimate, audits and the shuffle to it, and
changes none of it (`training/card.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

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
    "side channels: timing, memory, and the lowest bits of floating-point noise",
)
SEVERAL_ROWS = "several rows of one person: the unit of protection is one row"
USE_ASSUMPTIONS = (
    "the loss of a record depends on that record and the weights alone, not on its batch",
    "the training data influence the weights through this run only",
)
ONE_UNIT = "an example is a unit: all of the records that share an id, and no others"
CERTIFIED_METHOD_NOTE = "shuffling credited with nothing"
STOPPED_EARLY = (
    "when the run stopped: the ε of the whole plan covers every time of stopping that was chosen "
    "by the released weights, and none that was chosen by the records or by training metrics"
)


@dataclass(frozen=True, kw_only=True)
class CertifiedCard:
    """The certified claim, the facts it rests on, and how often each was watched.

    `certified_so_far` prices the steps taken by a run that has not finished.
    """

    certified: PrivacyClaim | None
    certified_so_far: PrivacyClaim | None
    why_not_certified: tuple[str, ...]
    steps_released: int
    steps_planned: int
    target: str
    sampler: str
    mechanism: tuple[str, ...]
    randomness: str
    private: bool
    checks: Checks
    threat_model: str = THREAT_MODEL
    use_assumptions: tuple[str, ...] = USE_ASSUMPTIONS
    not_covered: tuple[str, ...] = NOT_COVERED

    def __str__(self) -> str:
        lines = [f"Privacy card after {self.steps_released} of {self.steps_planned} steps"]
        for label, (first, *more) in self.sections():
            lines += [f"  {label:<17} {first}", *(f"  {'':<17} {line}" for line in more)]
        return "\n".join(lines)

    def sections(self) -> list[tuple[str, list[str]]]:
        """Every label of the card with its lines, in order."""
        return [
            ("certified ε", self.certified_lines),
            ("target", [self.target]),
            ("sampler", [self.sampler]),
            ("mechanism", [*self.mechanism, *self.check_lines]),
            ("randomness", [self.randomness]),
            ("threat model", [self.threat_model]),
            ("assumptions", list(self.assumptions)),
            ("not covered", list(self.not_covered)),
        ]

    @property
    def certified_lines(self) -> list[str]:
        """The certified claim, or why there is none."""
        if self.certified is None:
            return [f"{self.no_claim}: {'; '.join(self.why_not_certified)}"]
        line = f"{self.certified.describe()}, {CERTIFIED_METHOD_NOTE}"
        return [line] if self.spent_so_far is None else [line, self.spent_so_far]

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What the certified claim was priced under, then what the user must see to."""
        priced = () if self.certified is None else self.certified.assumptions
        return (*priced, *self.use_assumptions)

    @property
    def spent_so_far(self) -> str | None:
        """What the steps taken would cost had their number been fixed beforehand; None at the end.

        A time of stopping that depends on what was released is a release too, so the claim of a
        run that ended early is that of its plan.
        """
        if self.certified is None or self.certified_so_far is None:
            return None
        return (
            f"spent so far: ε = {self.certified_so_far.epsilon:.4g}, of a plan of ε = "
            f"{self.certified.epsilon:.4g} (proven); claim the plan's, unless this number of "
            "steps was fixed in advance"
        )

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
                f"{counted(checks.sums, 'step')}, the norms of "
                f"{counted(checks.norms, 'sample')}, "
                f"{counted(checks.noise, 'coordinate')} of the noise; none differed"
            )
        if checks.not_made:
            reasons = "; ".join(sorted(checks.reasons))
            lines.append(f"{counted(checks.not_made, 'comparison')} could not be made: {reasons}")
        return lines


def counted(number: int, noun: str) -> str:
    """A number and what it counts."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


TARGET_KINDS = {
    "certified": "proven",
    "rdp": "proven, by Rényi DP, which is looser than the certified ε",
    "paper": "heuristic, the paper's estimate",
}

Card = TypeVar("Card", bound=CertifiedCard)


def write_card(
    plan: PrivacyPlan,
    kind: type[Card],
    *,
    num_steps: int,
    checks: Checks | None = None,
    why_not: tuple[str, ...] = (),
    **more: Any,
) -> Card:
    """The card of a run that made `num_steps` releases under `plan`, priced as the whole plan.

    `why_not` are reasons of the run, besides those of the plan, that no epsilon can be certified;
    `more` are fields that `kind` has besides those of `CertifiedCard`.
    """
    reasons = (*plan.uncertifiable, *why_not)
    ended = num_steps in (0, plan.num_steps)
    return kind(
        certified=None if reasons else plan.certified(num_steps and plan.num_steps),
        certified_so_far=None if reasons or ended else plan.certified(num_steps),
        why_not_certified=reasons,
        steps_released=num_steps,
        steps_planned=plan.num_steps,
        target=_target(plan),
        sampler=_sampler(plan),
        mechanism=tuple(_mechanism(plan)),
        randomness=_randomness(plan),
        private=is_private(plan),
        checks=checks or Checks(),
        use_assumptions=(*USE_ASSUMPTIONS, *((ONE_UNIT,) if plan.records_per_unit else ())),
        not_covered=(
            *NOT_COVERED,
            *(() if plan.records_per_unit else (SEVERAL_ROWS,)),
            *(() if ended else (STOPPED_EARLY,)),
            *_large_delta(plan),
        ),
        **more,
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
    most, cut = plan.records_per_unit, plan.largest_batch
    more = f", with {most} of its records at most, averaged and clipped once" if most else ""
    more += f", {cut} of a larger draw" if cut else ""
    return (
        f"Poisson, every {_noun(plan)} joins each batch with probability {plan.sampling_prob:.6g} "
        f"(expected batch {plan.expected_batch_size} of {plan.dataset_size}){more}; "
        f"adjacency {plan.adjacency}"
    )


def _noun(plan: PrivacyPlan) -> str:
    return "unit" if plan.records_per_unit else "record"


def _mechanism(plan: PrivacyPlan) -> list[str]:
    one = "unit" if plan.records_per_unit else "sample"
    clip = f"per-{one} clip {plan.clip} at {plan.clip_norm:g} over all trainable parameters"
    lines = [clip if plan.bounds_samples else "no per-sample clip"]
    for block in plan.blocks:
        bound = block.batch_clip_norm
        batch = "no batch clip" if bound is None else f"batch clip {bound:g}"
        lines.append(
            f"block {block.name}: {block.dimension} coordinates, noise multiplier "
            f"{block.noise_multiplier:.6g}, {batch}"
        )
    if plan.bands > 1:
        lines.append(
            f"banded noise in blocks of {plan.bands} steps: a {_noun(plan)} joins one step of a "
            "block at most, and what one step adds later ones take away in part"
        )
    if plan.falls_back:
        lines.append("Algorithm 1 fell back to plain DP-SGD: shuffling would need more noise")
    return lines


def _large_delta(plan: PrivacyPlan) -> tuple[str, ...]:
    """What a delta of 1/N or more allows: publishing a record chosen at random meets it."""
    if plan.delta * plan.dataset_size < 1.0:
        return ()
    return (
        f"every single {_noun(plan)}: δ = {plan.delta:.3g} is not below 1/{plan.dataset_size}, and "
        f"a mechanism that publishes one {_noun(plan)} drawn at random meets such a δ",
    )


def _randomness(plan: PrivacyPlan) -> str:
    if plan.secure:
        where = "in memory to the end of its block" if plan.bands > 1 else "nowhere"
        return (
            "ChaCha20, keyed by the operating system anew for every release; the key is kept "
            f"{where}, and without it the noise cannot be computed"
        )
    return (
        "ChaCha20, keyed by a seed: whoever learns the seed can remove the noise, so every claim "
        "assumes that it is secret and used for no other run; a step that is released again with "
        "other sums has other noise"
    )
