"""Checks that need no statistics of an attack: what they report, and the one of the sampler.

Amplification by sampling is proven for records that join each step independently with probability
q. Batches of fixed size, epochs without replacement, and a wrong rate each leave a trace in one of
four counts; every test is exact or a large-sample normal, and all share one error level.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.stats import chi2, norm

from shuffled_dpsgd.core.sampler import Sampler
from shuffled_dpsgd.errors import InvalidArgumentError

FALSE_ALARM = 1e-4
"""Chance that a true Poisson sampler fails any of the four tests."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """What was measured against what is allowed; `passed` is their comparison, nothing else."""

    name: str
    measured: float
    allowed: float
    detail: str = ""

    @property
    def passed(self) -> bool:
        """False also for a measurement that is not a number."""
        return self.measured <= self.allowed

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "passed": self.passed,
            "measured": self.measured,
            "allowed": self.allowed,
            "detail": self.detail,
        }


@dataclass(frozen=True, kw_only=True)
class CheckReport:
    """Several checks of one thing."""

    unit: str
    setting: Mapping[str, Any]
    checks: tuple[Check, ...]
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

    @property
    def failed(self) -> tuple[str, ...]:
        """Names of the checks that do not hold."""
        return tuple(check.name for check in self.checks if not check.passed)

    def to_json(self) -> dict[str, Any]:
        return {
            "unit": self.unit,
            "setting": dict(self.setting),
            "passed": self.passed,
            "checks": [check.to_json() for check in self.checks],
            "seconds": self.seconds,
        }


def check_sampler(sampler: Sampler, *, sampling_prob: float, num_steps: int = 200) -> CheckReport:
    """Test `num_steps` batches of `sampler` against Poisson sampling at `sampling_prob`.

    Every statistic is a two-sided standard normal score; `allowed` is its critical value.
    """
    size = sampler.dataset_size
    if not 0.0 < sampling_prob < 1.0 or num_steps < 10 or size * sampling_prob < 5:
        raise InvalidArgumentError(
            "sampling_prob",
            expected="in (0, 1), with five records a batch or more, over ten steps or more",
            got=(sampling_prob, size, num_steps),
        )
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
