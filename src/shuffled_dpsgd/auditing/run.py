"""Audits of real training: many releases of one step, or one whole run with many canaries.

`audit_steps` puts the mechanism, shuffle and weights of a run on trial, at the level of one step.
`audit_one_run` trains once with hundreds of canaries, each included by a fair coin, and asks every
threat model in turn which of them were there (Steinke et al. 2023; Mahloujifar et al. 2024).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from shuffled_dpsgd.accounting import PrivacyClaim, certified_claim
from shuffled_dpsgd.auditing.canary_run import CanaryRun
from shuffled_dpsgd.auditing.estimators import OneRunFDP, OrderStatistics, ScorePair, area_of
from shuffled_dpsgd.auditing.input_canaries import plant
from shuffled_dpsgd.auditing.model_attacks import record_attack, step_attacks
from shuffled_dpsgd.auditing.probes import ModelAttack, Prober, probe
from shuffled_dpsgd.auditing.reach import reach_of
from shuffled_dpsgd.auditing.taps import OnProgress, refuse_shared_steps, train, trainable
from shuffled_dpsgd.auditing.target import (
    AuditTarget,
    RunSetting,
    count_in_budget,
    refuse_copies,
)
from shuffled_dpsgd.auditing.verdict import (
    ESTIMATORS,
    Attack,
    AuditReport,
    Membership,
    composition_note,
    report_on,
)
from shuffled_dpsgd.core.plan import PrivacyPlan
from shuffled_dpsgd.training.card import AuditedBound
from shuffled_dpsgd.training.planning import plan_json
from shuffled_dpsgd.training.private import PrivateTraining
from shuffled_dpsgd.training.spending import paper_estimate


def audit_steps(
    target: AuditTarget,
    setting: RunSetting,
    *,
    confidence: float = 0.95,
    on_progress: OnProgress | None = None,
) -> AuditReport:
    """Train a few steps, then release one step many times with and without each canary.

    The other records of that step contribute nothing: the neighbouring batches an adversary would
    choose, since a batch clip shrinks a canary among many records. Neighbours are arbitrary in the
    definition, so a claim refuted there is refuted.
    """
    started = time.perf_counter()
    refuse_copies(target, setting)
    private = target.start(target.size)
    plan = private.plan
    refuse_shared_steps(plan)
    steps = min(setting.warmup_steps, plan.num_steps)
    ended = count_in_budget(target, setting, plan, steps=steps)
    if steps:
        train(private, target.data, target.losses, target.collate, num_steps=steps)
        ended()
    attacks = [
        *step_attacks(trainable(private.model), private.spec, seed=setting.seed),
        *_record_attacks(private, target, setting),
    ]
    evidence = probe(
        Prober(private, seed=setting.seed),
        attacks,
        count=setting.num_observations,
        on_progress=on_progress,
    )
    private.close()
    claims, scores = step_claims(plan), evidence[0].scores
    assert isinstance(scores, ScorePair)
    made = scores.num_out
    report = report_on(
        evidence,
        ESTIMATORS,
        unit="one step of a run",
        setting={**asdict(setting), "observations_made": made, "plan": plan_json(plan)},
        claims=claims,
        confidence=confidence,
        started=started,
    )
    names = tuple(dict.fromkeys(item.adversary for item in evidence))
    length: Any = {"sampling_prob": plan.sampling_prob, "num_steps": plan.num_steps}
    return replace(
        report,
        notes=(composition_note(report.attacks, delta=plan.delta, **length),),
        reach=reach_of("step", names, count=made, delta=claims[0].delta, confidence=confidence),
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
    refuse_copies(target, setting)
    run = CanaryRun(target, setting)
    plan = run.private.plan
    steps = plan.num_steps if setting.other_records else 0
    ended = count_in_budget(target, setting, plan, steps=steps)
    run.train(on_progress)
    ended()
    noise = OrderStatistics(
        family="gaussian", sampling_prob=plan.sampling_prob, num_steps=plan.num_steps
    )
    membership = None
    if setting.num_input_canaries > 1:
        plain = None if target.start_plain is None else run.queried_after(target.start_plain)
        seen = run.queried(run.private)
        membership = Membership(
            canary=run.input_name,
            num_records=seen.num_canaries,
            with_privacy=area_of(seen.as_pair(), confidence=confidence),
            without_privacy=None
            if plain is None
            else area_of(plain.as_pair(), confidence=confidence),
        )
    report = report_on(
        run.evidence(),
        (OneRunFDP(), noise),
        unit="one whole run",
        setting={**asdict(setting), "plan": plan_json(plan)},
        claims=claims_of(plan),
        confidence=confidence,
        started=started,
        notes=run.notes(),
    )
    bounds = card_bounds(report.attacks, confidence=confidence)
    run.private.close()
    return replace(
        report,
        card=run.private.card().with_audits(*bounds),
        reach=reach_of(
            "one-run",
            tuple(attack.evidence.adversary for attack in report.attacks),
            count=max(setting.num_gradient_canaries, setting.num_input_canaries),
            delta=plan.delta,
            confidence=confidence,
        ),
        membership=membership,
    )


def claims_of(plan: PrivacyPlan) -> tuple[PrivacyClaim, ...]:
    """Certified and paper's ε of a whole run, where it has them."""
    return tuple(c for c in (plan.certified(), paper_estimate(plan)) if c is not None)


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
    """Each attack's strongest joint bound, as the card words it.

    The joint bounds hold all together at `confidence`, the level they were divided from.
    """
    strongest = [(attack, max(attack.joint, key=lambda b: b.epsilon)) for attack in attacks]
    return tuple(
        AuditedBound(
            adversary=attack.label,
            estimator=bound.method,
            epsilon=bound.epsilon,
            delta=bound.delta,
            confidence=confidence,
            tests_noise=bound.may_refute == "Gaussian claims",
        )
        for attack, bound in strongest
    )


def _record_attacks(
    private: PrivateTraining, target: AuditTarget, setting: RunSetting
) -> list[ModelAttack]:
    """One record as a canary, if the setting has any."""
    rng, kind = np.random.default_rng([setting.seed, 9]), setting.input_canary
    count = min(setting.num_input_canaries, 1)
    return [
        record_attack(private, record, target.losses, target.collate, kind=kind)
        for record in plant(kind, target.data, count, rng, private.model)
    ]
