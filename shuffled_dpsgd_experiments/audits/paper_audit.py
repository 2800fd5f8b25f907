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

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from shuffled_dpsgd.accounting.paper import PaperCalibration, calibrate_paper
from shuffled_dpsgd.auditing.estimators import (
    ClopperPearson,
    EstimatedBound,
    OrderStatistics,
    PaperPoint,
    ScorePair,
)
from shuffled_dpsgd.auditing.estimators.paper_point import LACKS, Dropped, null_distribution
from shuffled_dpsgd.auditing.estimators.scores import Floats

PRINTED: Mapping[float, float] = {0.5: 0.4771, 1.0: 0.7005}
"""Table 6: theoretical ε of the run -> audited ε, as printed."""
PRUNED = 0.5
"""The only claim for which the paper says that thresholds were dropped."""
Quantiles = tuple[float, float, float]


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


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One way to read the paper's text, and what its estimator prints under it.

    Quantiles are the 5th, 50th and 95th percent of the finite figures; the shares say how often
    the figure is infinite instead. `*_on_noise`: when nothing leaks at all.
    """

    name: str
    drop: Dropped
    num_observations: int
    quantiles: Quantiles | None
    infinite: float
    quantiles_on_noise: Quantiles | None
    infinite_on_noise: float

    def to_json(self) -> dict[str, Any]:
        return {
            "dropped": self.drop,
            "observations_in_each_world": self.num_observations,
            "quantiles": None if self.quantiles is None else list(self.quantiles),
            "share_infinite": self.infinite,
            "quantiles_on_pure_noise": None
            if self.quantiles_on_noise is None
            else list(self.quantiles_on_noise),
            "share_infinite_on_pure_noise": self.infinite_on_noise,
        }


@dataclass(frozen=True, kw_only=True)
class PaperRow:
    """One column of Table 6: the first repetition's estimate, both readings, and two bounds."""

    run_epsilon: float
    step_epsilon: float
    step_delta: float
    noise_multiplier: float
    printed: float | None
    estimate: EstimatedBound
    strict: Reading
    literal: Reading
    bound: EstimatedBound
    order_statistics: EstimatedBound

    def to_json(self) -> dict[str, Any]:
        return {
            "run_epsilon": {"epsilon": self.run_epsilon, "kind": "heuristic"},
            "step_epsilon": {"epsilon": self.step_epsilon, "kind": "heuristic"},
            "step_delta": self.step_delta,
            "noise_multiplier": self.noise_multiplier,
            "printed_in_the_paper": self.printed,
            "paper_estimator": self.estimate.to_json(),
            "readings": {one.name: one.to_json() for one in (self.strict, self.literal)},
            "clopper_pearson": self.bound.to_json(),
            "order_statistics": self.order_statistics.to_json(),
            "lacks": list(LACKS),
        }


def fixed_index_scores(
    *, noise_multiplier: float, axis_size: int, count: int, rng: np.random.Generator
) -> ScorePair:
    """The watched index with and without the canary, which lands there once in `axis_size`."""
    noise = noise_multiplier * rng.standard_normal((2, count))
    return ScorePair(out=noise[0], present=noise[1] + (rng.integers(axis_size, size=count) == 0))


def paper_audit(setting: PaperSetting, epsilons: tuple[float, ...] = (0.5, 1.0)) -> list[PaperRow]:
    """Table 6 repeated: per claim, the paper's figure and what it is worth."""
    return [_row(setting, epsilon) for epsilon in epsilons]


def _row(setting: PaperSetting, epsilon: float) -> PaperRow:
    calibration = calibrate_paper(
        epsilon=epsilon,
        delta=setting.delta,
        sampling_prob=setting.sampling_prob,
        num_steps=setting.num_steps,
        dimension=setting.dimension,
        batch_clip=setting.batch_clip,
    )
    rng = np.random.default_rng([setting.seed, round(1000 * epsilon)])
    runs = _runs(setting, calibration, setting.num_observations, rng)
    longer = _runs(setting, calibration, 2 * setting.num_observations, rng)
    delta = calibration.step_delta
    return PaperRow(
        run_epsilon=epsilon,
        step_epsilon=calibration.step_epsilon,
        step_delta=delta,
        noise_multiplier=calibration.noise_multiplier,
        printed=PRINTED.get(epsilon),
        estimate=PaperPoint().lower_bound(runs[0], delta=delta),
        strict=_read("strict", "either", setting, runs, delta),
        literal=_read(
            "literal", "both" if epsilon == PRUNED else "nothing", setting, longer, delta
        ),
        bound=ClopperPearson().lower_bound(runs[0], delta=delta),
        order_statistics=OrderStatistics().lower_bound(runs[0], delta=delta),
    )


def _runs(
    setting: PaperSetting, calibration: PaperCalibration, count: int, rng: np.random.Generator
) -> list[ScorePair]:
    return [
        fixed_index_scores(
            noise_multiplier=calibration.noise_multiplier,
            axis_size=setting.axis_size,
            count=count,
            rng=rng,
        )
        for _ in range(setting.repetitions)
    ]


def _read(
    name: str, drop: Dropped, setting: PaperSetting, runs: list[ScorePair], delta: float
) -> Reading:
    estimator = PaperPoint(drop=drop)
    printed = np.array([estimator.lower_bound(scores, delta=delta).epsilon for scores in runs])
    noise = null_distribution(
        num_observations=runs[0].num_out,
        delta=delta,
        repetitions=setting.repetitions,
        seed=setting.seed,
        drop=drop,
    )
    return Reading(
        name=name,
        drop=drop,
        num_observations=runs[0].num_out,
        quantiles=_quantiles(printed),
        infinite=float(np.isinf(printed).mean()),
        quantiles_on_noise=_quantiles(noise),
        infinite_on_noise=float(np.isinf(noise).mean()),
    )


def _quantiles(values: Floats) -> Quantiles | None:
    finite = values[np.isfinite(values)]
    if finite.size == 0:
        return None
    low, middle, high = np.quantile(finite, (0.05, 0.5, 0.95))
    return float(low), float(middle), float(high)
