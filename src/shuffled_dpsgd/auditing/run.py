"""Audits of real training: many releases of one step, or one whole run with many canaries.

`audit_steps` puts the mechanism, shuffle and weights of a run on trial, at the level of one step.
`audit_one_run` trains once with hundreds of canaries, each included by a fair coin, and asks every
threat model in turn which of them were there (Steinke et al. 2023; Mahloujifar et al. 2024).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, get_args

import numpy as np

from shuffled_dpsgd.accounting import PrivacyClaim, certified_claim
from shuffled_dpsgd.auditing.estimators import OneRun, OneRunFDP, ScorePair
from shuffled_dpsgd.auditing.input_canaries import InputCanary, plant
from shuffled_dpsgd.auditing.model_attacks import noise_attacks, step_attacks, tensor_attacks
from shuffled_dpsgd.auditing.one_run_training import CanaryRun
from shuffled_dpsgd.auditing.probes import OnProgress, Prober, probe, trainable
from shuffled_dpsgd.auditing.ranges import require_at_least
from shuffled_dpsgd.auditing.reach import one_run_reach, step_reach
from shuffled_dpsgd.auditing.record_canaries import ReadRecord, RecordGradient
from shuffled_dpsgd.auditing.step import ESTIMATORS, composition_notes
from shuffled_dpsgd.auditing.verdict import Attack, AuditReport, Evidence, assess, judge
from shuffled_dpsgd.core.plan import PrivacyPlan
from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.training.budget import BudgetFile, counted
from shuffled_dpsgd.training.card import AuditedBound
from shuffled_dpsgd.training.data import MapStyle
from shuffled_dpsgd.training.physical import PerSampleLoss
from shuffled_dpsgd.training.planning import plan_json
from shuffled_dpsgd.training.private import PrivateTraining
from shuffled_dpsgd.training.record_digest import data_mark
from shuffled_dpsgd.training.spending import paper_estimate


@dataclass(frozen=True, kw_only=True)
class AuditTarget:
    """What is audited: how to start a fresh run on a data set of a given size, and its records.

    `budget` is the file in which an audit of these records counts itself.
    """

    start: Callable[[int], PrivateTraining]
    data: MapStyle
    losses: PerSampleLoss
    collate: Callable[[list[Any]], Any] | None = None
    budget: str | None = None


@dataclass(frozen=True, kw_only=True)
class RunSetting:
    """How much is spent on an audit.

    `warmup_steps` of real training precede a step audit; `num_gradient_canaries` and
    `num_input_canaries` are planted in a one-run audit; a step audit takes one record as a canary
    unless they are zero. Without `other_records` canaries alone take part in a one-run audit, the
    worst case of the definition. `fit_steps` records how long the target's initial weights were
    fitted to its records before. A step audit makes no more releases after `max_seconds` of them.
    """

    num_observations: int = 500
    warmup_steps: int = 5
    num_gradient_canaries: int = 500
    num_input_canaries: int = 100
    input_canary: InputCanary = "mislabelled"
    other_records: bool = True
    fit_steps: int = 0
    max_seconds: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.input_canary not in get_args(InputCanary):
            raise InvalidArgumentError(
                "input_canary", expected=f"one of {get_args(InputCanary)}", got=self.input_canary
            )
        require_at_least(
            self,
            num_observations=20,
            warmup_steps=0,
            num_gradient_canaries=2,
            num_input_canaries=0,
            fit_steps=0,
        )


@dataclass(frozen=True, kw_only=True)
class StepsSeen:
    """What a step audit has read so far, and all that its report needs besides."""

    evidence: tuple[Evidence, ...]
    plan: PrivacyPlan
    setting: RunSetting
    seconds: float


def audit_steps(
    target: AuditTarget,
    setting: RunSetting,
    *,
    confidence: float = 0.95,
    on_progress: OnProgress | None = None,
    on_seen: Callable[[StepsSeen], object] | None = None,
) -> AuditReport:
    """Train a few steps, then release one step many times with and without each canary.

    The other records of that step contribute nothing: the neighbouring batches an adversary would
    choose, since a batch clip shrinks a canary among many records. Neighbours are arbitrary in the
    definition, so a claim refuted there is refuted. `on_seen` is handed what there is now and then,
    for a report by `report_steps` should the audit not come to its end.
    """
    started = time.perf_counter()
    private = target.start(len(target.data))
    warmup = min(setting.warmup_steps, private.plan.num_steps)
    _count_in_budget(target, setting, private.plan, steps=warmup)
    _train(private, target, num_steps=warmup)
    attacks = [
        *step_attacks(trainable(private.model), private.spec, seed=setting.seed),
        *_record_attacks(private, target, setting),
    ]

    def seen(evidence: Sequence[Evidence]) -> StepsSeen:
        seconds = time.perf_counter() - started
        return StepsSeen(
            evidence=tuple(evidence), plan=private.plan, setting=setting, seconds=seconds
        )

    evidence = probe(
        Prober(private, seed=setting.seed),
        attacks,
        count=setting.num_observations,
        max_seconds=setting.max_seconds,
        on_progress=on_progress,
        on_evidence=None if on_seen is None else lambda found: on_seen(seen(found)),
    )
    private.close()
    return report_steps(seen(evidence), confidence=confidence)


def report_steps(seen: StepsSeen, *, confidence: float = 0.95) -> AuditReport:
    """The report of a step audit on what was read."""
    plan, evidence = seen.plan, seen.evidence
    claims = step_claims(plan)
    delta, made = claims[0].delta, _count(evidence)
    assessed = assess(evidence, ESTIMATORS, delta=delta, confidence=confidence)
    return AuditReport(
        unit="one step of a run",
        setting={**asdict(seen.setting), "observations_made": made, "plan": plan_json(plan)},
        claims=claims,
        attacks=assessed,
        verdicts=judge(claims, assessed, confidence=confidence),
        seconds=seen.seconds,
        notes=composition_notes(
            assessed,
            sampling_prob=plan.sampling_prob,
            num_steps=plan.num_steps,
            delta=plan.delta,
        ),
        reach=step_reach(
            tuple(dict.fromkeys(item.adversary for item in evidence)),
            num_observations=made,
            delta=delta,
            confidence=confidence,
        ),
    )


def audit_mechanism(
    private: PrivateTraining,
    *,
    num_observations: int = 400,
    num_sweep: int = 120,
    seed: int = 0,
    confidence: float = 0.95,
) -> AuditReport:
    """The mechanism's own output against its proven claim: noise too small, repeated or missing.

    A direction over all tensors and the difference of two steps, `num_observations` each; then
    every tensor on its own, `num_sweep` each (0 for none), enough to see noise that is missing.
    """
    started = time.perf_counter()
    weights = trainable(private.model)
    claim = certified_step(private.plan, private.plan.delta / private.plan.num_steps)
    prober = Prober(private, seed=seed)
    evidence = probe(prober, noise_attacks(weights, seed=seed), count=num_observations)
    if num_sweep:
        evidence += probe(prober, tensor_attacks(weights, seed=seed), count=num_sweep)
    attacks = assess(evidence, ESTIMATORS, delta=claim.delta, confidence=confidence)
    return AuditReport(
        unit="the mechanism of a run",
        setting={"num_observations": num_observations, "num_sweep": num_sweep, "seed": seed},
        claims=(claim,),
        attacks=attacks,
        verdicts=judge((claim,), attacks, confidence=confidence),
        seconds=time.perf_counter() - started,
    )


def audit_one_run(
    target: AuditTarget,
    setting: RunSetting,
    *,
    confidence: float = 0.95,
    on_progress: OnProgress | None = None,
) -> AuditReport:
    """Train once with canaries, to the end of the plan, and let every threat model guess them."""
    started = time.perf_counter()
    run = CanaryRun(
        start=target.start,
        data=target.data,
        losses=target.losses,
        collate=target.collate,
        num_gradient_canaries=setting.num_gradient_canaries,
        num_input_canaries=setting.num_input_canaries,
        input_canary=setting.input_canary,
        other_records=setting.other_records,
        seed=setting.seed,
    )
    plan = run.private.plan
    _count_in_budget(target, setting, plan, steps=plan.num_steps if setting.other_records else 0)
    run.train(on_progress)
    claims = tuple(c for c in (plan.certified(), paper_estimate(plan)) if c is not None)
    estimators = (OneRun(), OneRunFDP(), OneRunFDP(family="gaussian"))
    assessed = assess(run.evidence(), estimators, delta=plan.delta, confidence=confidence)
    run.private.close()
    return AuditReport(
        unit="one whole run",
        setting={**asdict(setting), "plan": plan_json(plan)},
        claims=claims,
        attacks=assessed,
        verdicts=judge(claims, assessed, confidence=confidence),
        seconds=time.perf_counter() - started,
        notes=run.notes(),
        card=run.private.card().with_audits(*card_bounds(assessed, confidence=confidence)),
        reach=one_run_reach(
            tuple(attack.evidence.adversary for attack in assessed),
            num_canaries=max(setting.num_gradient_canaries, setting.num_input_canaries),
            delta=plan.delta,
            confidence=confidence,
        ),
    )


def step_claims(plan: PrivacyPlan) -> tuple[PrivacyClaim, ...]:
    """Certified and paper's ε of a single step in which the canary takes part, at one δ.

    The δ is the per-step one of the paper's composition where its formula applies, the run's δ
    over the number of steps otherwise.
    """
    paper = paper_estimate(plan)
    delta = plan.delta / plan.num_steps
    if paper is not None and "step_delta" in paper.inputs:
        delta = float(paper.inputs["step_delta"])
    certified = certified_step(plan, delta)
    if paper is None or "step_epsilon" not in paper.inputs:
        return (certified,)
    estimate = PrivacyClaim(
        epsilon=float(paper.inputs["step_epsilon"]),
        delta=delta,
        method=f"{paper.method}, one step",
        kind="heuristic",
        assumptions=paper.assumptions,
        inputs=paper.inputs,
    )
    return certified, estimate


def certified_step(plan: PrivacyPlan, delta: float) -> PrivacyClaim:
    """The proven ε of one step in which the canary takes part: the plain Gaussian mechanism."""
    return certified_claim(
        noise_multiplier=plan.smallest_noise_multiplier, sampling_prob=1.0, num_steps=1, delta=delta
    )


def card_bounds(attacks: Sequence[Attack], *, confidence: float) -> tuple[AuditedBound, ...]:
    """Each attack's strongest joint bound that holds for any mechanism, as the card words it.

    The joint bounds hold all together at `confidence`, the level they were divided from.
    """
    strongest = [
        (attack, max(admitted, key=lambda bound: bound.epsilon))
        for attack in attacks
        if (admitted := [b for b in attack.joint if b.may_refute == "any claim"])
    ]
    return tuple(
        AuditedBound(
            adversary=attack.label,
            estimator=bound.method,
            epsilon=bound.epsilon,
            delta=bound.delta,
            confidence=confidence,
        )
        for attack, bound in strongest
    )


def _count_in_budget(
    target: AuditTarget, setting: RunSetting, plan: PrivacyPlan, *, steps: int
) -> None:
    """Write an audit whose runs take so many steps with the records into their budget."""
    if target.budget is None:
        return
    if setting.num_input_canaries or setting.fit_steps:
        raise InvalidArgumentError(
            "budget",
            expected="gradient canaries alone, and initial weights that never saw the records",
            got=f"{setting.num_input_canaries} input canaries, {setting.fit_steps} fit steps",
            remedy="what copies of records and fitted weights show has no noise: leave them out "
            "with --input-canaries 0",
        )
    if steps:
        file = BudgetFile(target.budget)
        salt = file.read().salt
        entry = counted(plan, name=f"audit, {setting.num_gradient_canaries} canaries", salt=salt)
        file.enter(replace(entry, num_steps=steps), data_mark(target.data, salt))


def _count(evidence: Sequence[Evidence]) -> int:
    """Releases in each world, the same for all adversaries of a step audit."""
    scores = evidence[0].scores
    assert isinstance(scores, ScorePair)
    return scores.num_out


def _record_attacks(
    private: PrivateTraining, target: AuditTarget, setting: RunSetting
) -> list[ReadRecord]:
    """One record as a canary, if the setting has any."""
    rng = np.random.default_rng([setting.seed, 9])
    return [
        ReadRecord(
            private,
            RecordGradient(private, record, target.losses, target.collate),
            kind=setting.input_canary,
        )
        for record in plant(
            setting.input_canary, target.data, min(setting.num_input_canaries, 1), rng
        )
    ]


def _train(private: PrivateTraining, target: AuditTarget, *, num_steps: int) -> None:
    if num_steps == 0:
        return
    for batch in private.batches(target.data, num_steps=num_steps, collate=target.collate):
        private.backward(target.losses(private.model, batch))
        private.step()
