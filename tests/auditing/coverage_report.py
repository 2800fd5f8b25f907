"""How often each bound exceeds a known ε, and how close it comes.

Run as a script with a file name to write the table there, which takes about eight minutes of one
core: `python tests/auditing/coverage_report.py results/audit_coverage.json`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from auditing.known import (
    Known,
    gaussian,
    geometric,
    laplace,
    leaky_response,
    mixed_response,
    nothing,
    randomized_response,
    sampled_gaussian,
    uniform,
)
from shuffled_dpsgd.auditing.estimators import (
    ClopperPearson,
    Fixed,
    GaussianDP,
    JointBeta,
    OneRun,
    OneRunFDP,
    OrderStatistics,
    PaperPoint,
)
from shuffled_dpsgd.environment import environment

CONFIDENCE = 0.95
MECHANISMS = [
    gaussian(1.0, 1e-5),
    gaussian(3.0, 1e-5),
    laplace(1.0),
    randomized_response(0.3),
    randomized_response(3.0),
    leaky_response(0.5, 0.05),
    geometric(0.7),
    mixed_response(0.5, 2.0),
    sampled_gaussian(3.0, 0.1, 1e-3),
    uniform(0.05),
    nothing(),
]
TWO_WORLDS = {
    "order-statistics": OrderStatistics(),
    "clopper-pearson, held-out": ClopperPearson(),
    "clopper-pearson, fixed": ClopperPearson(rule=Fixed(thresholds=(0.5, 1.5))),
    "joint-beta": JointBeta(),
}
ONE_RUN = {"one-run": OneRun(), "one-run-fdp": OneRunFDP()}
GAUSSIAN_ONLY = {
    "order-statistics-gaussian": OrderStatistics(family="gaussian"),
    "gaussian-dp": GaussianDP(),
}
GAUSSIAN_ONE_RUN = {"one-run-fdp-gaussian": OneRunFDP(family="gaussian")}
NO_LEVEL = {"paper-point": PaperPoint()}


def bounds(
    estimator: Any, mechanism: Known, count: int, *, one_run: bool, repetitions: int
) -> np.ndarray:
    """The estimator's bound on fresh observations, `repetitions` times."""
    found = []
    for repetition in range(repetitions):
        rng = np.random.default_rng([repetition, count])
        seen = mechanism.inclusion(rng, count) if one_run else mechanism.scores(rng, count)
        bound = estimator.lower_bound(seen, delta=mechanism.delta, confidence=CONFIDENCE)
        found.append(bound.epsilon)
    return np.array(found)


def report(repetitions: int = 1000, count: int = 500) -> dict[str, Any]:
    """Share of bounds above the truth, and the median bound, per estimator and mechanism."""
    table: dict[str, Any] = {}
    groups = (
        (TWO_WORLDS | NO_LEVEL, MECHANISMS, False),
        (ONE_RUN, MECHANISMS, True),
        (GAUSSIAN_ONLY, MECHANISMS[:2], False),
        (GAUSSIAN_ONE_RUN, MECHANISMS[:2], True),
    )
    for estimators, mechanisms, one_run in groups:
        for name, estimator in estimators.items():
            rows = table[name] = {}
            for known in mechanisms:
                found = bounds(estimator, known, count, one_run=one_run, repetitions=repetitions)
                rows[known.name] = {
                    "true_epsilon": known.epsilon,
                    "above_the_truth": float((found > known.epsilon).mean()),
                    "median_bound": float(np.median(found)),
                }
    return {
        "repetitions": repetitions,
        "observations": count,
        "confidence": CONFIDENCE,
        "estimators": table,
    }


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(
        json.dumps({**report(), "environment": environment()}, indent=2) + "\n", encoding="utf-8"
    )
