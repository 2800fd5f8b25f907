"""How often each bound exceeds a known ε, and how close it comes.

Run as a script with a file name to write the table there, which takes about fifteen minutes of one
core: `python tests/auditing/coverage_report.py results/audit_coverage.json`.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch

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
    sampled_run,
    uniform,
)
from shuffled_dpsgd.auditing.canary_run import STEP_BY_STEP, CanaryRun
from shuffled_dpsgd.auditing.estimators import ClopperPearson, OneRunFDP, OrderStatistics
from shuffled_dpsgd.auditing.target import AuditTarget, RunSetting
from shuffled_dpsgd.environment import environment
from shuffled_dpsgd.training import make_private
from shuffled_dpsgd.training.private import PrivateTraining

COMMAND = "python tests/auditing/coverage_report.py results/audit_coverage.json"
CONFIDENCE = 0.95
OBSERVATIONS, REPETITIONS, OF_REAL_RUNS = 500, 1000, 500
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
TWO_WORLDS = {"order-statistics": OrderStatistics(), "clopper-pearson": ClopperPearson()}
ONE_RUN = {"one-run-fdp": OneRunFDP()}
GAUSSIAN_ONLY = {"order-statistics-gaussian": OrderStatistics(family="gaussian")}
RUN = {"sampling_prob": 0.1, "num_steps": 20}
OVER_A_RUN = {"order-statistics-gaussian, over a run": OrderStatistics(family="gaussian", **RUN)}
LONG_RUN = sampled_run(2.0, delta=1e-5, **RUN)
CASES = [
    (name, estimator, known, estimators is ONE_RUN)
    for estimators, mechanisms in (
        (TWO_WORLDS, MECHANISMS),
        (ONE_RUN, MECHANISMS),
        (GAUSSIAN_ONLY, MECHANISMS[:2]),
        (OVER_A_RUN, [LONG_RUN]),
    )
    for name, estimator in estimators.items()
    for known in mechanisms
]
REAL = {"sampling_prob": 0.5, "num_steps": 4}
"""Real training: 16 records and 40 canaries, one hidden layer, shuffled in every step, AdamW."""


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


def real_run(seed: int) -> CanaryRun:
    """One run of a real network with canaries, trained to its end."""

    def start(size: int) -> PrivateTraining:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
        return make_private(
            model,
            torch.optim.AdamW(model.parameters(), lr=1e-2),
            dataset_size=size,
            expected_batch_size=size // 2,
            num_steps=REAL["num_steps"],
            noise_multiplier=1.0,
            delta=1e-5,
            clip_norm=1.0,
            seed=seed,
        )

    generator = torch.Generator().manual_seed(1)
    data = torch.utils.data.TensorDataset(
        torch.randn(16, 6, generator=generator), torch.randint(3, (16,), generator=generator)
    )
    target = AuditTarget(
        start=start,
        data=data,
        losses=lambda model, batch: torch.nn.functional.cross_entropy(
            model(batch[0]), batch[1], reduction="none"
        ),
    )
    setting = RunSetting(num_gradient_canaries=40, num_input_canaries=0, seed=seed)
    run = CanaryRun(target, setting)
    run.train()
    run.private.close()
    return run


def bounds_of_real_runs(repetitions: int) -> np.ndarray:
    """Over the noise of every step, from single runs of real training."""
    estimator = OrderStatistics(family="gaussian", **REAL)
    found = []
    for seed in range(repetitions):
        (evidence,) = (e for e in real_run(seed).evidence() if e.adversary == STEP_BY_STEP)
        found.append(estimator.lower_bound(evidence.scores, delta=1e-5).epsilon)
    return np.array(found)


def row(found: np.ndarray, truth: float) -> dict[str, float | int]:
    return {
        "repetitions": int(found.size),
        "true_epsilon": truth,
        "above_the_truth": float((found > truth).mean()),
        "median_bound": float(np.median(found)),
    }


def report(count: int = OBSERVATIONS) -> dict[str, Any]:
    """Share of bounds above the truth, and the median bound, per estimator and mechanism."""
    table: dict[str, Any] = {}
    for name, estimator, known, one_run in CASES:
        found = bounds(estimator, known, count, one_run=one_run, repetitions=REPETITIONS)
        rows = table.setdefault(name, {})
        rows[known.name] = row(found, known.epsilon)
        print(name, known.name, rows[known.name], file=sys.stderr, flush=True)
    truth = sampled_run(1.0, delta=1e-5, **REAL).epsilon
    table["order-statistics-gaussian, real runs"] = {
        "4 steps of real training": row(bounds_of_real_runs(OF_REAL_RUNS), truth)
    }
    return {"observations": count, "confidence": CONFIDENCE, "estimators": table}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    Path(sys.argv[1]).write_text(
        json.dumps({**report(), "command": COMMAND, "environment": environment()}, indent=2) + "\n",
        encoding="utf-8",
    )
