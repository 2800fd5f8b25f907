"""A whole run of the mechanism in isolation: many sampled steps, no model, thousands of runs.

The canary joins each step with the sampling probability, and the adversary adds up the exact log
likelihood ratios of all steps, so its score is the privacy loss itself and its test the strongest
there is (Neyman–Pearson). What it sees in a step is one number with Gaussian noise: the axis sum of
a constant canary, which no permutation moves, or the entry at a fixed index, where a shuffled Dirac
canary lands once in `axis_size`. All values are in units of `clip_norm`.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace

import numpy as np

from shuffled_dpsgd.accounting import PrivacyClaim, certified_claim, paper_claim
from shuffled_dpsgd.auditing.estimators import ClopperPearson, OrderStatistics
from shuffled_dpsgd.auditing.estimators.scores import Floats, ScorePair
from shuffled_dpsgd.auditing.verdict import (
    AuditReport,
    Evidence,
    ThreatModel,
    check_fields,
    report_on,
)
from shuffled_dpsgd.core.events import check_sampling

ESTIMATORS = (ClopperPearson(), OrderStatistics())


@dataclass(frozen=True, kw_only=True)
class CompositionSetting:
    """A run of `num_steps` steps sampled at `sampling_prob`, released `num_observations` times."""

    noise_multiplier: float
    sampling_prob: float
    num_steps: int
    delta: float
    dimension: int
    batch_clip: float
    axis_size: int = 3072
    num_observations: int = 5000
    seed: int = 0

    def __post_init__(self) -> None:
        check_sampling(self.sampling_prob, self.num_steps)
        check_fields(self, "noise_multiplier", axis_size=2, num_observations=100)


def run_claims(
    setting: CompositionSetting, *, paper_epsilon: float | None = None
) -> tuple[PrivacyClaim, ...]:
    """The certified ε of the run, and the paper's: by its formula, or as given.

    The formula is so steep in σ that three digits of σ do not fix it; a figure is better given.
    """
    facts = asdict(setting)
    run = {key: facts[key] for key in ("noise_multiplier", "sampling_prob", "num_steps", "delta")}
    of_theorem = {key: facts[key] for key in ("dimension", "batch_clip")}
    paper = paper_claim(**run, **of_theorem)
    if paper_epsilon is not None:
        method = f"{paper.method}, as given"
        paper = replace(paper, epsilon=paper_epsilon, method=method, inputs=of_theorem)
    return certified_claim(**run), paper


def audit_composition(
    setting: CompositionSetting, claims: tuple[PrivacyClaim, ...], *, confidence: float = 0.95
) -> AuditReport:
    """Runs with and without the canary, judged against claims about the whole run."""
    started = time.perf_counter()
    rng = np.random.default_rng([setting.seed, 5])
    seen = (
        ("fixed index, every step", "dirac", setting.sampling_prob / setting.axis_size),
        ("axis sum, every step", "constant-on-axis", setting.sampling_prob),
    )
    evidence = [
        Evidence(
            adversary=adversary,
            canary=canary,
            threat_model=ThreatModel.STEP_GRADIENTS,
            scores=ScorePair(
                out=privacy_losses(setting, rate, rng, present=False),
                present=privacy_losses(setting, rate, rng, present=True),
            ),
        )
        for adversary, canary, rate in seen
    ]
    return report_on(
        evidence,
        ESTIMATORS,
        unit="a run in isolation",
        setting=asdict(setting),
        claims=claims,
        confidence=confidence,
        started=started,
    )


def privacy_losses(
    setting: CompositionSetting, rate: float, rng: np.random.Generator, *, present: bool
) -> Floats:
    """Summed log likelihood ratios of one run each; the canary shows up in a step at `rate`.

    A step's ratio of the mixture (1 − rate)·N(0, σ²) + rate·N(1, σ²) to N(0, σ²) at y is
    1 − rate + rate·exp((2y − 1) / 2σ²).
    """
    sigma = setting.noise_multiplier
    totals = np.zeros(setting.num_observations)
    for _ in range(setting.num_steps):
        seen = sigma * rng.standard_normal(setting.num_observations)
        if present:
            seen += rng.random(setting.num_observations) < rate
        exponent = (2.0 * seen - 1.0) / (2.0 * sigma**2)
        totals += np.logaddexp(np.log1p(-rate) if rate < 1.0 else -np.inf, np.log(rate) + exponent)
    return totals
