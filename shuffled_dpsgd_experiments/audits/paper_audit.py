"""The paper's own audit (its Table 6), as it was done, and what it was able to see.

A Dirac canary, read at the index where it was planted, in many steps with and without it, at the
noise the paper's formula asks for; the estimator of its Sec. V-F. Beside its figure stand what the
same estimator prints when nothing leaks at all, and bounds with a confidence level.

The text leaves two things open, and both readings are run. `strict`: 10,000 steps are 5000 with the
canary and 5000 without, and a threshold is dropped when either error is below 4e-4. `literal`: each
of the 10,000 steps is seen with and without, and a threshold is dropped when both errors are below
4e-4, for ε = 0.5 only; nothing is dropped elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from shuffled_dpsgd.accounting.paper import calibrate_paper
from shuffled_dpsgd.auditing.estimators import ClopperPearson, OrderStatistics, ScorePair
from shuffled_dpsgd.auditing.estimators.clopper_pearson import epsilon_of_rates, survival
from shuffled_dpsgd.auditing.estimators.scores import Floats
from shuffled_dpsgd_experiments.tables.printed import AUDIT

PRUNED = 0.5
"""The only claim for which the paper says that thresholds were dropped."""
DROPPED_BELOW = 4e-4
Dropped = Literal["either", "both", "nothing"]
"""Thresholds that go: those where either rate lies below `DROPPED_BELOW`, both do, or none."""
LACKS = (
    "a point estimate: no confidence interval",
    "the best of all thresholds, without correction",
)


@dataclass(frozen=True, kw_only=True)
class PaperSetting:
    """ViT on CIFAR-100 (Table 1), with the batch clip its text implies.

    `num_observations` is that of the strict reading, in each world; the literal one has twice as
    many.
    """

    dimension: int = 85_800_000
    sampling_prob: float = 0.02
    num_steps: int = 500
    delta: float = 5e-6
    batch_clip: float = 1.0
    axis_size: int = 3072
    num_observations: int = 5000
    repetitions: int = 200
    seed: int = 0


def paper_point(scores: ScorePair, *, delta: float, drop: Dropped = "either") -> float:
    """The paper's own estimator (its Sec. V-F): the largest point estimate over all thresholds.

    ε = max{ln((1−α−δ)/β), ln((1−β−δ)/α), 0}. It bounds nothing, and may be infinite. For ε = 0.5
    the paper drops thresholds "where α < 4e-4 and β < 4e-4". Taken at its word (`both`), a
    threshold without a single error on one side stays, and the estimate is infinite; `either` drops
    those, which must be what was done where a finite figure is printed.
    """
    thresholds = np.unique(np.concatenate([scores.out, scores.present]))
    below = np.searchsorted(np.sort(scores.present), thresholds, side="right")
    alpha, beta = survival(scores.out, thresholds), below / scores.num_present
    small = (alpha < DROPPED_BELOW).astype(int) + (beta < DROPPED_BELOW)
    kept = small < {"either": 1, "both": 2, "nothing": 3}[drop]
    return float(epsilon_of_rates(alpha[kept], beta[kept], delta).max(initial=0.0))


def null_distribution(
    *,
    num_observations: int,
    delta: float,
    repetitions: int = 200,
    seed: int = 0,
    drop: Dropped = "either",
) -> Floats:
    """What the estimator prints when nothing leaks at all: both worlds the same normal noise."""
    rng = np.random.default_rng(seed)
    worlds = (rng.standard_normal((2, num_observations)) for _ in range(repetitions))
    return np.array(
        [paper_point(ScorePair(out=o, present=p), delta=delta, drop=drop) for o, p in worlds]
    )


def fixed_index_scores(
    *, noise_multiplier: float, axis_size: int, count: int, rng: np.random.Generator
) -> ScorePair:
    """The watched index with and without the canary, which lands there once in `axis_size`."""
    noise = noise_multiplier * rng.standard_normal((2, count))
    return ScorePair(out=noise[0], present=noise[1] + (rng.integers(axis_size, size=count) == 0))


def paper_audit(
    setting: PaperSetting, epsilons: tuple[float, ...] = (0.5, 1.0)
) -> list[dict[str, Any]]:
    """Table 6 repeated: per claim, the paper's figure and what it is worth, as plain data."""
    return [_row(setting, epsilon) for epsilon in epsilons]


def _row(setting: PaperSetting, epsilon: float) -> dict[str, Any]:
    """One column of the table: the first repetition's estimate, both readings, and two bounds."""
    names = ("delta", "sampling_prob", "num_steps", "dimension", "batch_clip")
    calibration = calibrate_paper(epsilon=epsilon, **{n: getattr(setting, n) for n in names})
    rng = np.random.default_rng([setting.seed, round(1000 * epsilon)])
    delta, noise = calibration.step_delta, calibration.noise_multiplier
    seen: dict[str, Any] = {"noise_multiplier": noise, "axis_size": setting.axis_size, "rng": rng}
    runs, longer = (
        [fixed_index_scores(count=count, **seen) for _ in range(setting.repetitions)]
        for count in (setting.num_observations, 2 * setting.num_observations)
    )
    literally: Dropped = "both" if epsilon == PRUNED else "nothing"
    estimate = paper_point(runs[0], delta=delta)
    return {
        "run_epsilon": {"epsilon": epsilon, "kind": "heuristic"},
        "step_epsilon": {"epsilon": calibration.step_epsilon, "kind": "heuristic"},
        "step_delta": delta,
        "noise_multiplier": noise,
        "printed_in_the_paper": dict(AUDIT).get(epsilon),
        "paper_estimator": {"epsilon": estimate, "kind": "measured", "confidence": None},
        "readings": {
            "strict": _reading("either", setting, runs, delta),
            "literal": _reading(literally, setting, longer, delta),
        },
        "clopper_pearson": ClopperPearson().lower_bound(runs[0], delta=delta).to_json(),
        "order_statistics": OrderStatistics().lower_bound(runs[0], delta=delta).to_json(),
        "lacks": list(LACKS),
    }


def _reading(
    drop: Dropped, setting: PaperSetting, runs: list[ScorePair], delta: float
) -> dict[str, Any]:
    """What the paper's estimator prints under one reading of its text, and when nothing leaks.

    Quantiles are the 5th, 50th and 95th percent of the finite figures; the shares say how often
    the figure is infinite instead.
    """
    printed = np.array([paper_point(scores, delta=delta, drop=drop) for scores in runs])
    noise = null_distribution(
        num_observations=runs[0].num_out,
        delta=delta,
        repetitions=setting.repetitions,
        seed=setting.seed,
        drop=drop,
    )
    return {
        "dropped": drop,
        "observations_in_each_world": runs[0].num_out,
        "quantiles": _quantiles(printed),
        "share_infinite": float(np.isinf(printed).mean()),
        "quantiles_on_pure_noise": _quantiles(noise),
        "share_infinite_on_pure_noise": float(np.isinf(noise).mean()),
    }


def _quantiles(values: Floats) -> list[float] | None:
    finite = values[np.isfinite(values)]
    if finite.size == 0:
        return None
    return [float(value) for value in np.quantile(finite, (0.05, 0.5, 0.95))]
