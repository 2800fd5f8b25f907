"""Statistics of a run's sampler and of its mechanism: what planted faults are found by.

Amplification by sampling is proven for records that join each step independently with probability
q. Batches of fixed size, epochs without replacement, and a wrong rate each leave a trace in one of
four counts; every test is exact or a large-sample normal, and all share one error level.
"""

from __future__ import annotations

import time

import numpy as np
import torch
from scipy.stats import chi2, norm

from shuffled_dpsgd.auditing.checks import Check, CheckReport
from shuffled_dpsgd.auditing.model_attacks import noise_attack, noise_attacks, random_direction
from shuffled_dpsgd.auditing.probes import Prober, probe
from shuffled_dpsgd.auditing.run import certified_step
from shuffled_dpsgd.auditing.taps import trainable
from shuffled_dpsgd.auditing.verdict import ESTIMATORS, AuditReport, report_on
from shuffled_dpsgd.core.sampler import PoissonSampler
from shuffled_dpsgd.training.private import PrivateTraining

FALSE_ALARM = 1e-4
"""Chance that a true Poisson sampler fails any of the four tests."""


def check_sampler(
    sampler: PoissonSampler, *, sampling_prob: float, num_steps: int = 200
) -> CheckReport:
    """Test `num_steps` batches of `sampler` against Poisson sampling at `sampling_prob`.

    Every statistic is a two-sided standard normal score; `allowed` is its critical value.
    """
    size = sampler.dataset_size
    started = time.perf_counter()
    joined = np.zeros((num_steps, size), dtype=np.int64)
    for step in range(num_steps):
        np.add.at(joined[step], sampler.indices(step).cpu().numpy(), 1)
    q = sampling_prob
    overlap = (joined[1:] * joined[:-1]).sum()
    scores = {
        "rate": _normal(joined.sum(), size * num_steps, q),
        "batch sizes vary as binomials": _dispersion(joined.sum(axis=1), size, q),
        "records recur as binomials": _dispersion(joined.sum(axis=0), num_steps, q),
        "successive batches overlap": _normal(overlap, size * (num_steps - 1), q * q),
    }
    allowed = float(norm.isf(FALSE_ALARM / (2 * len(scores))))
    return CheckReport(
        unit="sampler",
        setting={"sampling_prob": q, "dataset_size": size, "num_steps": num_steps},
        checks=tuple(
            Check(name=name, measured=abs(score), allowed=allowed, detail="|normal score|")
            for name, score in scores.items()
        ),
        seconds=time.perf_counter() - started,
    )


def _normal(count: float, trials: int, prob: float) -> float:
    return float((count - trials * prob) / np.sqrt(trials * prob * (1.0 - prob)))


def _dispersion(counts: np.ndarray, trials: int, prob: float) -> float:
    """Normal score of the sum of squared deviations, which is χ² for binomial counts."""
    statistic = float(((counts - trials * prob) ** 2).sum() / (trials * prob * (1.0 - prob)))
    if statistic > counts.size:
        return float(norm.isf(max(chi2.sf(statistic, counts.size), 1e-300)))
    return float(norm.ppf(max(chi2.cdf(statistic, counts.size), 1e-300)))


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
        generator = torch.Generator().manual_seed(seed)
        evidence += probe(
            prober,
            [
                noise_attack(f"noise on {name}", random_direction({name: tensor}, generator))
                for name, tensor in weights.items()
            ],
            count=num_sweep,
        )
    return report_on(
        evidence,
        ESTIMATORS,
        unit="the mechanism of a run",
        setting={"num_observations": num_observations, "num_sweep": num_sweep, "seed": seed},
        claims=(claim,),
        confidence=confidence,
        started=started,
    )
