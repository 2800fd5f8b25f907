"""The knock-out: what a black box learns from a shuffled run, and from the same run unshuffled.

The shuffle preserves the model's function, and training commutes with it, so whoever only queries
the released model faces the same distribution with the shuffle and without. Here both are run over
many seeds, with the same records and the same membership attacks. Three arms per seed:

    off        no shuffle
    on         shuffle after every step, noise drawn in the shuffled frame: equal in distribution
    on-paired  the same with the noise of `off`, drawn in the un-permuted frame: equal run by run

The audited records are mislabelled, each in the training data by a fair coin. Attacks: the loss
itself, and a likelihood ratio per record with the other seeds' runs as shadow models (Carlini et
al. 2022).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import t as student
from torch.utils.data import default_collate

from shuffled_dpsgd.auditing.estimators import Inclusion, OneRun, ScorePair, roc, tpr_at_fpr
from shuffled_dpsgd.auditing.estimators.scores import Floats
from shuffled_dpsgd.auditing.input_canaries import (
    Extended,
    InputCanary,
    Leaving,
    losses_of,
    plant,
)
from shuffled_dpsgd.auditing.probes import OnProgress
from shuffled_dpsgd.auditing.ranges import require_at_least
from shuffled_dpsgd.options import NoiseFrame, Shuffle
from shuffled_dpsgd.training.data import MapStyle
from shuffled_dpsgd.training.physical import PerSampleLoss
from shuffled_dpsgd.training.private import PrivateTraining

Start = Callable[[int, int, Shuffle, NoiseFrame], PrivateTraining]
"""(data set size, seed, shuffle, noise frame) -> a fresh run."""
ARMS: dict[str, tuple[Shuffle, NoiseFrame]] = {
    "off": ("off", "shuffled"),
    "on": ("every-step", "shuffled"),
    "on-paired": ("every-step", "unshuffled"),
}


@dataclass(frozen=True, kw_only=True)
class BlackBoxSetting:
    """`num_seeds` runs of every arm, each audited on `num_canaries` records that are planted."""

    num_seeds: int = 12
    num_canaries: int = 100
    input_canary: InputCanary = "mislabelled"
    seed: int = 0

    def __post_init__(self) -> None:
        require_at_least(self, num_seeds=3, num_canaries=10)


@dataclass(frozen=True, kw_only=True)
class Arm:
    """Losses of every canary in every run of one arm (seeds × canaries), and who was in."""

    losses: Floats
    included: NDArray[np.bool_]

    def loss_scores(self) -> Floats:
        return -self.losses

    def ratio_scores(self) -> Floats:
        """Log likelihood ratio of present against absent, from the other seeds' runs.

        Per record two means, over the runs with and without it; one variance for all records.
        """
        confidence = -self.losses - np.log(-np.expm1(-np.maximum(self.losses, 1e-12)))
        others = 1.0 - np.eye(len(self.losses))
        means = {
            kind: _means_of_others(confidence, mask, others)
            for kind, mask in (("in", self.included), ("out", ~self.included))
        }
        own = np.where(self.included, means["in"], means["out"])
        spread = float(np.mean((confidence - own) ** 2))
        away = (confidence - means["out"]) ** 2 - (confidence - means["in"]) ** 2
        ratio: Floats = away / (2.0 * spread)
        return ratio


def _means_of_others(values: Floats, mask: NDArray[np.bool_], others: Floats) -> Floats:
    """Mean over the other runs in which `mask` holds; over all other runs where none does."""
    count = others @ mask.astype(np.float64)
    held = (others @ (values * mask)) / np.maximum(count, 1.0)
    overall = (others @ values) / others.sum(axis=1, keepdims=True)
    means: Floats = np.where(count > 0.0, held, overall)
    return means


@dataclass(frozen=True, kw_only=True)
class BlackBoxReport:
    """Both attacks on every arm; `to_json` compares the arms."""

    setting: BlackBoxSetting
    plan: dict[str, Any]
    arms: dict[str, Arm]
    confidence: float
    seconds: float

    def scores(self, arm: str, attack: str) -> Floats:
        found = self.arms[arm]
        return found.loss_scores() if attack == "loss" else found.ratio_scores()

    def pooled(self, arm: str, attack: str) -> ScorePair:
        scores, included = self.scores(arm, attack), self.arms[arm].included
        return ScorePair(out=scores[~included], present=scores[included])

    def areas(self, arm: str, attack: str) -> Floats:
        """Area under the ROC curve of every run."""
        return np.array(
            [
                roc(ScorePair(out=row[~was], present=row[was])).area
                for row, was in zip(self.scores(arm, attack), self.arms[arm].included, strict=True)
            ]
        )

    @property
    def largest_paired_difference(self) -> float:
        """Largest difference of any canary's loss between `off` and `on-paired`."""
        return float(np.abs(self.arms["off"].losses - self.arms["on-paired"].losses).max())

    def comparison(self, attack: str) -> dict[str, float]:
        """Mean difference of the areas, on minus off, with Student's interval over seeds."""
        gaps = self.areas("on", attack) - self.areas("off", attack)
        half = float(
            student.ppf(0.5 + self.confidence / 2.0, len(gaps) - 1)
            * gaps.std(ddof=1)
            / len(gaps) ** 0.5
        )
        mean = float(gaps.mean())
        return {"mean_difference": mean, "low": mean - half, "high": mean + half}

    def to_json(self) -> dict[str, Any]:
        return {
            "setting": asdict(self.setting),
            "plan": self.plan,
            "confidence": self.confidence,
            "arms": {name: self._arm_json(name) for name in self.arms},
            "on_minus_off": {attack: self.comparison(attack) for attack in ("loss", "ratio")},
            "largest_paired_difference": self.largest_paired_difference,
            "seconds": self.seconds,
        }

    def _arm_json(self, name: str) -> dict[str, Any]:
        shown: dict[str, Any] = {}
        for attack in ("loss", "ratio"):
            pair = self.pooled(name, attack)
            shown[attack] = {
                "area_by_seed": self.areas(name, attack).tolist(),
                "pooled_area": roc(pair).area,
                "pooled_tpr_at_1_percent_fpr": tpr_at_fpr(pair, 0.01).true_positive_rate,
            }
        bounds = [
            OneRun()
            .lower_bound(
                Inclusion(scores=row, included=was),
                delta=float(self.plan["delta"]),
                confidence=1.0 - (1.0 - self.confidence) / self.setting.num_seeds,
            )
            .epsilon
            for row, was in zip(self.scores(name, "loss"), self.arms[name].included, strict=True)
        ]
        return {**shown, "largest_one_run_bound": {"epsilon": max(bounds), "kind": "measured"}}


def audit_black_box(
    start: Start,
    data: MapStyle,
    losses: PerSampleLoss,
    setting: BlackBoxSetting,
    *,
    collate: Callable[[list[Any]], Any] = default_collate,
    confidence: float = 0.95,
    on_progress: OnProgress | None = None,
) -> BlackBoxReport:
    """Every arm with every seed; canaries and coins are the same in all arms of a seed."""
    started = time.perf_counter()
    rng = np.random.default_rng([setting.seed, 7])
    canaries = plant(setting.input_canary, data, setting.num_canaries, rng)
    joined = Extended(data, canaries)
    coins = np.random.default_rng([setting.seed, 8]).random((setting.num_seeds, len(canaries)))
    included = coins < 0.5
    found: dict[str, list[Floats]] = {name: [] for name in ARMS}
    plan: dict[str, Any] = {}
    for index in range(setting.num_seeds):
        for name, (shuffle, frame) in ARMS.items():
            private = start(len(joined), 1000 * setting.seed + index, shuffle, frame)
            left_out = len(data) + np.flatnonzero(~included[index])
            private.sampler = Leaving(private.sampler, left_out)
            found[name].append(_train_and_query(private, joined, canaries, losses, collate))
            plan = plan or private.plan.to_json()
        if on_progress is not None:
            on_progress(index + 1, setting.num_seeds)
    return BlackBoxReport(
        setting=setting,
        plan=plan,
        arms={name: Arm(losses=np.stack(rows), included=included) for name, rows in found.items()},
        confidence=confidence,
        seconds=time.perf_counter() - started,
    )


def _train_and_query(
    private: PrivateTraining,
    data: MapStyle,
    canaries: list[Any],
    losses: PerSampleLoss,
    collate: Callable[[list[Any]], Any],
) -> Floats:
    """The loss of every canary under the released model."""
    for batch in private.batches(data, collate=collate):
        private.backward(losses(private.model, batch))
        private.step()
    private.release()
    queried = losses_of(private, canaries, losses, collate)
    private.close()
    return queried
