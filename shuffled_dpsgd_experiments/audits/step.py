"""One step of the mechanism in isolation: thousands of releases, no model, no training.

Everything is in units of `clip_norm` = 1, so the noise std is the noise multiplier. Permuting a
noisy vector and adding noise to a permuted one have the same distribution (the noise is
exchangeable), so only the canary is moved. The other samples contribute nothing. The theorem's own
worst-case pair is no attack on Algorithm 1; `shuffled-dpsgd examine` has its true δ.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from shuffled_dpsgd.accounting import PrivacyClaim, certified_claim
from shuffled_dpsgd.accounting.paper import ASSUMPTIONS
from shuffled_dpsgd.accounting.theorem import gaussian_epsilon, smallest_epsilon
from shuffled_dpsgd.auditing.estimators import ClopperPearson, OrderStatistics
from shuffled_dpsgd.auditing.estimators.scores import Floats, ScorePair
from shuffled_dpsgd.auditing.verdict import (
    ESTIMATORS,
    AuditReport,
    Evidence,
    ThreatModel,
    check_fields,
    composition_note,
    report_on,
)
from shuffled_dpsgd_experiments.audits import axis
from shuffled_dpsgd_experiments.audits.axis import AxisCanary, Reading

CHUNK_VALUES = 1 << 21


@dataclass(frozen=True, kw_only=True)
class StepSetting:
    """What is audited.

    `dimension` is the d of the paper's formula; `axis_size` the axis a real permutation moves (3072
    hidden units of a ViT-B block); `aligned_*` the group that re-alignment is tried on (the 64
    dimensions of a head).
    """

    noise_multiplier: float
    dimension: int
    delta: float
    batch_clip: float = 1.0
    axis_size: int = 3072
    num_observations: int = 5000
    seed: int = 0
    aligned_rows: int = 64
    aligned_width: int = 64
    weight_std: float = 0.02
    step_size: float = 2e-6
    """Learning rate over batch size: how far one unit of gradient moves a weight."""

    def __post_init__(self) -> None:
        positive = ("noise_multiplier", "batch_clip", "weight_std", "step_size")
        least = {"dimension": 2, "axis_size": 2, "aligned_rows": 2, "aligned_width": 1}
        check_fields(self, *positive, **least, num_observations=100)


def step_claims(
    setting: StepSetting, *, paper_epsilon: float | None = None
) -> tuple[PrivacyClaim, ...]:
    """What is on trial: the certified ε of the step, and the paper's.

    Without `paper_epsilon` the paper's comes from Theorem 3 at this σ; it is so steep in σ that
    three digits of σ do not fix it, so a figure read from a table is better given.
    """
    noise, delta = setting.noise_multiplier, setting.delta
    of_theorem: dict[str, Any] = {"dimension": setting.dimension, "batch_clip": setting.batch_clip}
    source = "as given" if paper_epsilon is not None else "by theorem 3"
    if paper_epsilon is None:
        paper_epsilon = smallest_epsilon(noise, delta, **of_theorem)
    paper = PrivacyClaim(
        epsilon=paper_epsilon,
        delta=delta,
        method=f"the paper's step estimate, {source}",
        kind="heuristic",
        assumptions=ASSUMPTIONS,
        inputs=of_theorem,
    )
    certified = certified_claim(noise_multiplier=noise, sampling_prob=1.0, num_steps=1, delta=delta)
    return certified, paper


def audit_step(
    setting: StepSetting,
    claims: tuple[PrivacyClaim, ...],
    *,
    confidence: float = 0.95,
    run: dict[str, Any] | None = None,
) -> AuditReport:
    """Every adversary against one step, judged against `claims` (all at the setting's δ).

    `run` (sampling_prob, num_steps and delta) adds what the step amounts to over a run.
    """
    started = time.perf_counter()
    evidence = [*axis_evidence(setting), aligned_evidence(setting)]
    report = report_on(
        evidence,
        ESTIMATORS,
        unit="one step",
        setting=asdict(setting),
        claims=claims,
        confidence=confidence,
        started=started,
        notes=(cap_note(setting.num_observations, delta=setting.delta, confidence=confidence),),
    )
    if run is None:
        return report
    return replace(report, notes=(*report.notes, composition_note(report.attacks, **run)))


def cap_note(num_observations: int, *, delta: float, confidence: float) -> str:
    """What bounds from scores cannot exceed, however well the worlds are told apart."""
    perfect = ScorePair(out=np.zeros(num_observations), present=np.ones(num_observations))
    caps = [
        one.lower_bound(perfect, delta=delta, confidence=confidence).epsilon
        for one in (ClopperPearson(), OrderStatistics())
    ]
    return (
        f"with {num_observations} releases in each world no bound for any mechanism exceeds "
        f"{caps[0]:.2f} (Clopper–Pearson) or {caps[1]:.2f} (order statistics): they measure the "
        "sample; the closed form, where there is one, measures the leak"
    )


@dataclass(frozen=True, kw_only=True)
class AxisAttack:
    """A canary on one axis, and how it is read; whether a permutation moves its tensor."""

    name: str
    canary: AxisCanary
    read: Reading
    permuted: bool = True

    def closed_form(self, setting: StepSetting) -> float | None:
        """The exact ε where the score is N(0, σ²) without the canary and N(1, σ²) with it.

        The sum along the axis of a constant canary, and the inner product with one that stays.
        """
        if self.permuted and not (self.canary.is_constant and self.read is axis.axis_sum):
            return None
        return gaussian_epsilon(setting.noise_multiplier, setting.delta)


def axis_attacks(size: int, rng: np.random.Generator) -> list[AxisAttack]:
    """What is tried on one axis."""
    dirac, constant = axis.dirac(size), axis.constant(size)
    direction = axis.random_direction(size, rng)
    return [
        AxisAttack(name="fixed index", canary=dirac, read=axis.at_fixed_index),
        AxisAttack(name="orbit maximum", canary=dirac, read=axis.orbit_maximum),
        AxisAttack(name="orbit likelihood ratio", canary=dirac, read=axis.orbit_likelihood_ratio),
        AxisAttack(name="orbit maximum", canary=direction, read=axis.orbit_maximum),
        AxisAttack(name="axis sum", canary=constant, read=axis.axis_sum),
        AxisAttack(
            name="un-permuted tensor", canary=direction, read=axis.matched_filter, permuted=False
        ),
    ]


def axis_evidence(setting: StepSetting) -> list[Evidence]:
    """All attacks on one axis, each on the same noise in both of its worlds."""
    rng = np.random.default_rng([setting.seed, 1])
    attacks, sigma = axis_attacks(setting.axis_size, rng), setting.noise_multiplier
    found: list[dict[bool, list[Floats]]] = [{False: [], True: []} for _ in attacks]
    for present in (False, True):
        for rows in _chunks(setting.num_observations, setting.axis_size):
            noise = sigma * rng.standard_normal((rows, setting.axis_size))
            observed: dict[tuple[str, bool], Floats] = {}
            for attack, scores in zip(attacks, found, strict=True):
                canary, permuted = attack.canary, attack.permuted
                key = (canary.name, permuted)
                if key not in observed:
                    planted = axis.place(canary, rows, rng, permuted) if present else None
                    observed[key] = noise if planted is None else noise + planted
                scores[present].append(attack.read(observed[key], canary, sigma))
    return [
        Evidence(
            adversary=attack.name,
            canary=attack.canary.name,
            threat_model=ThreatModel.STEP_GRADIENTS,
            scores=_two_worlds(scores),
            closed_form=attack.closed_form(setting),
        )
        for attack, scores in zip(attacks, found, strict=True)
    ]


def aligned_evidence(setting: StepSetting) -> Evidence:
    """Re-alignment: the adversary holds W_t, sees P·(W_t − step), and undoes P by assignment.

    What it then reads is the noisy gradient as if nothing had been permuted, wherever the
    assignment is right; a wrong one is scored as it comes.
    """
    rng = np.random.default_rng([setting.seed, 2])
    rows, width = setting.aligned_rows, setting.aligned_width
    known = setting.weight_std * rng.standard_normal((rows, width))
    canary = axis.random_direction(rows * width, rng)
    scores: dict[bool, list[Floats]] = {False: [], True: []}
    for present in (False, True):
        for count in _chunks(setting.num_observations, rows * width):
            gradient = setting.noise_multiplier * rng.standard_normal((count, rows, width))
            if present:
                gradient += canary.vector.reshape(rows, width)
            order = rng.permuted(np.tile(np.arange(rows), (count, 1)), axis=1)
            moved = known - setting.step_size * gradient
            released = np.take_along_axis(moved, order[:, :, None], axis=1)
            undo = axis.match_rows(known, released)
            aligned = np.take_along_axis(released, undo[:, :, None], axis=1)
            read = ((known - aligned) / setting.step_size).reshape(count, -1)
            scores[present].append(read @ canary.vector)
    return Evidence(
        adversary="re-alignment against W_t",
        canary=canary.name,
        threat_model=ThreatModel.ITERATES,
        scores=_two_worlds(scores),
    )


def _two_worlds(scores: dict[bool, list[Floats]]) -> ScorePair:
    return ScorePair(out=np.concatenate(scores[False]), present=np.concatenate(scores[True]))


def _chunks(total: int, row_size: int) -> Iterator[int]:
    rows = max(1, CHUNK_VALUES // row_size)
    for start in range(0, total, rows):
        yield min(rows, total - start)
