"""Records of runs that never were: their accuracy is a known function of ε."""

from __future__ import annotations

import math
from typing import Any

from shuffled_dpsgd_experiments.frontier.cells import Record, Stage
from shuffled_dpsgd_experiments.frontier.workloads import Point, Workload


def accuracy(epsilon: float) -> float:
    return 0.5 + 0.1 * math.log2(1.0 + epsilon)


def made_up(
    workload: Workload,
    point: Point,
    *,
    certified: float | None = None,
    score: float | None = None,
    seed: int = 100,
    stage: Stage = "figure",
    rate: float | None = None,
) -> Record:
    """One record; DP-SGD by default lies on the curve at the ε that it was asked for."""
    certified = point.epsilon if certified is None else certified
    score = accuracy(certified) if score is None else score
    found: dict[str, Any] = {
        "workload": workload.name,
        "stage": stage,
        "algorithm": "paper" if point.is_paper else "dp-sgd",
        "epsilon": point.epsilon,
        "batch_clip_ratio": point.batch_clip_ratio,
        "learning_rate": workload.middle_rate if rate is None else rate,
        "seed": seed,
        "streams": 2,
        "settings": "made up",
        "accuracy": {"held back" if stage == "tuning" else "test": score + 0.001 * (seed % 3 - 1)},
        "certified_epsilon": certified,
        "paper_epsilon": point.epsilon,
        "noise_multipliers": {"rest": 1.0},
        "commit": "0123456789",
        "date": "2026-11-18",
    }
    return found


def whole(workload: Workload, *, loss: float = 0.05) -> list[Record]:
    """Every point with three seeds; the paper's lie `loss` below the curve."""
    found = []
    for point in workload.points():
        certified = None if point.batch_clip_ratio is None else 100.0 / point.batch_clip_ratio
        score = accuracy(certified or point.epsilon) - (loss if point.is_paper else 0.0)
        found += [
            made_up(workload, point, certified=certified, score=score, seed=seed)
            for seed in (100, 101, 102)
        ]
        found += [
            made_up(workload, point, stage="tuning", seed=seed, rate=workload.middle_rate * power)
            for power in (0.5, 1.0, 2.0, 4.0)
            for seed in range(workload.num_tuning_seeds)
        ]
    return found
