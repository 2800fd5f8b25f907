"""The paper's own audit (its Table 6), as it was done, and what it was able to see.

A Dirac canary, read at the index where it was planted, in many steps with and without it, at the
noise the paper's formula asks for; the estimator of its Sec. V-F. Beside its figure stand what the
same estimator prints when nothing leaks at all, and a bound with a confidence level.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from shuffled_dpsgd.accounting.paper import calibrate_paper
from shuffled_dpsgd.auditing.estimators import AuditedBound, ClopperPearson, PaperPoint, ScorePair
from shuffled_dpsgd.auditing.estimators.paper_point import LACKS, null_distribution
from shuffled_dpsgd.auditing.estimators.scores import Floats

PRINTED: Mapping[float, float] = {0.5: 0.4771, 1.0: 0.7005}
"""Table 6: theoretical ε of the run -> audited ε, as printed."""


@dataclass(frozen=True, kw_only=True)
class PaperSetting:
    """ViT on CIFAR-100 (Table 1), with the batch clip its text implies."""

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
class PaperRow:
    """One column of Table 6. Quantiles are the 5th, 50th and 95th percent."""

    run_epsilon: float
    step_epsilon: float
    step_delta: float
    noise_multiplier: float
    printed: float | None
    estimate: AuditedBound
    estimate_quantiles: tuple[float, float, float]
    noise_quantiles: tuple[float, float, float]
    bound: AuditedBound

    def to_json(self) -> dict[str, Any]:
        return {
            "run_epsilon": {"epsilon": self.run_epsilon, "kind": "heuristic"},
            "step_epsilon": {"epsilon": self.step_epsilon, "kind": "heuristic"},
            "step_delta": self.step_delta,
            "noise_multiplier": self.noise_multiplier,
            "printed_in_the_paper": self.printed,
            "paper_estimator": self.estimate.to_json(),
            "paper_estimator_quantiles": list(self.estimate_quantiles),
            "paper_estimator_quantiles_on_pure_noise": list(self.noise_quantiles),
            "clopper_pearson": self.bound.to_json(),
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
    runs = [
        fixed_index_scores(
            noise_multiplier=calibration.noise_multiplier,
            axis_size=setting.axis_size,
            count=setting.num_observations,
            rng=rng,
        )
        for _ in range(setting.repetitions)
    ]
    delta = calibration.step_delta
    estimates = [PaperPoint().lower_bound(scores, delta=delta) for scores in runs]
    noise = null_distribution(
        num_observations=setting.num_observations,
        delta=delta,
        repetitions=setting.repetitions,
        seed=setting.seed,
    )
    return PaperRow(
        run_epsilon=epsilon,
        step_epsilon=calibration.step_epsilon,
        step_delta=delta,
        noise_multiplier=calibration.noise_multiplier,
        printed=PRINTED.get(epsilon),
        estimate=estimates[0],
        estimate_quantiles=_quantiles(np.array([one.epsilon for one in estimates])),
        noise_quantiles=_quantiles(noise),
        bound=ClopperPearson().lower_bound(runs[0], delta=delta),
    )


def _quantiles(values: Floats) -> tuple[float, float, float]:
    low, middle, high = np.quantile(values, (0.05, 0.5, 0.95))
    return float(low), float(middle), float(high)
