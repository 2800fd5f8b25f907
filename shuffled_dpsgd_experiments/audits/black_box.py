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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import t as student
from torch.utils.data import default_collate

from shuffled_dpsgd.accounting import PrivacyClaim
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
from shuffled_dpsgd.core.plan import PrivacyPlan
from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.options import NoiseFrame, Shuffle
from shuffled_dpsgd.training.data import MapStyle
from shuffled_dpsgd.training.physical import PerSampleLoss
from shuffled_dpsgd.training.planning import plan_json
from shuffled_dpsgd.training.private import PrivateTraining
from shuffled_dpsgd.training.spending import paper_estimate

Start = Callable[[int, int, Shuffle, NoiseFrame], PrivateTraining]
"""(data set size, seed, shuffle, noise frame) -> a fresh run."""
ARMS: dict[str, tuple[Shuffle, NoiseFrame]] = {
    "off": ("off", "shuffled"),
    "on": ("every-step", "shuffled"),
    "on-paired": ("every-step", "unshuffled"),
}
ATTACKS = ("loss", "ratio")
LEAST_SEEDS = 3


@dataclass(frozen=True, kw_only=True)
class BlackBoxSetting:
    """`num_seeds` runs of every arm, each audited on `num_canaries` records that are planted."""

    num_seeds: int = 12
    num_canaries: int = 100
    input_canary: InputCanary = "mislabelled"
    seed: int = 0

    def __post_init__(self) -> None:
        require_at_least(self, num_seeds=LEAST_SEEDS, num_canaries=10)


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
    claims: tuple[PrivacyClaim, ...] = ()

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
            "on_minus_off": {attack: self.comparison(attack) for attack in ATTACKS},
            "largest_paired_difference": self.largest_paired_difference,
            "verdicts": [self._verdict(claim) for claim in self.claims],
            "seconds": self.seconds,
        }

    @property
    def num_seeds(self) -> int:
        """Runs of each arm."""
        return len(self.arms["off"].included)

    @cached_property
    def strongest(self) -> tuple[float, str]:
        """The largest one-run bound of any run, arm and attack, all at the joint level."""
        level = (1.0 - self.confidence) / (self.num_seeds * len(self.arms) * len(ATTACKS))
        return max(
            (max(self._bounds(arm, attack, confidence=1.0 - level)), f"{attack}, shuffle {arm}")
            for arm in self.arms
            for attack in ATTACKS
        )

    def _verdict(self, claim: PrivacyClaim) -> dict[str, Any]:
        bound, attack = self.strongest
        outcome = f"refuted at {100 * self.confidence:g} %"
        return {
            "claim": claim.to_json(),
            "outcome": outcome if bound > claim.epsilon else "consistent",
            "strongest_bound": bound,
            "strongest_attack": attack,
        }

    def _bounds(self, arm: str, attack: str, *, confidence: float) -> list[float]:
        """A bound from each run by itself; the ratio's shadow models are other runs."""
        delta = float(self.plan["delta"])
        return [
            OneRun()
            .lower_bound(Inclusion(scores=row, included=was), delta=delta, confidence=confidence)
            .epsilon
            for row, was in zip(self.scores(arm, attack), self.arms[arm].included, strict=True)
        ]

    def _arm_json(self, name: str) -> dict[str, Any]:
        shown: dict[str, Any] = {}
        for attack in ATTACKS:
            pair = self.pooled(name, attack)
            shown[attack] = {
                "area_by_seed": self.areas(name, attack).tolist(),
                "pooled_area": roc(pair).area,
                "pooled_tpr_at_1_percent_fpr": tpr_at_fpr(pair, 0.01).true_positive_rate,
            }
        level = (1.0 - self.confidence) / self.num_seeds
        bounds = self._bounds(name, "loss", confidence=1.0 - level)
        return {**shown, "largest_one_run_bound": {"epsilon": max(bounds), "kind": "measured"}}


@dataclass(frozen=True, kw_only=True)
class SeedRuns:
    """The losses of every canary after one seed's run of every arm, and who was in."""

    index: int
    included: NDArray[np.bool_]
    losses: Mapping[str, Floats]
    plan: PrivacyPlan


class BlackBoxRuns:
    """Trains every arm of any seed; canaries and coins are the same in all arms of a seed."""

    def __init__(
        self,
        start: Start,
        data: MapStyle,
        losses: PerSampleLoss,
        setting: BlackBoxSetting,
        *,
        collate: Callable[[list[Any]], Any] = default_collate,
    ) -> None:
        self._start, self._losses, self._collate = start, losses, collate
        self._setting = setting
        self._num_records = len(data)
        rng = np.random.default_rng([setting.seed, 7])
        self._canaries = plant(setting.input_canary, data, setting.num_canaries, rng)
        self._data = Extended(data, self._canaries)

    def run(self, index: int) -> SeedRuns:
        """Seed number `index`, whichever others are run, and where."""
        seed = self._setting.seed
        coins = np.random.default_rng([seed, 8]).random((index + 1, len(self._canaries)))
        included = coins[index] < 0.5
        left_out = self._num_records + np.flatnonzero(~included)
        found: dict[str, Floats] = {}
        for name, (shuffle, frame) in ARMS.items():
            private = self._start(len(self._data), 1000 * seed + index, shuffle, frame)
            private.sampler = Leaving(private.sampler, left_out)
            found[name] = self._train_and_query(private)
        return SeedRuns(index=index, included=included, losses=found, plan=private.plan)

    def _train_and_query(self, private: PrivateTraining) -> Floats:
        """The loss of every canary under the released model."""
        for batch in private.batches(self._data, collate=self._collate):
            private.backward(self._losses(private.model, batch))
            private.step()
        private.release()
        queried = losses_of(private, self._canaries, self._losses, self._collate)
        private.close()
        return queried


def gather_seeds(
    found: Sequence[SeedRuns],
    setting: BlackBoxSetting,
    *,
    seconds: float,
    confidence: float = 0.95,
) -> BlackBoxReport:
    """The report on the seeds that were run, in the order of their numbers."""
    if len(found) < LEAST_SEEDS:
        raise InvalidArgumentError(
            "seeds", expected=f"at least {LEAST_SEEDS} that were run", got=len(found)
        )
    ordered = sorted(found, key=lambda one: one.index)
    included = np.stack([one.included for one in ordered])
    plan = ordered[0].plan
    return BlackBoxReport(
        setting=setting,
        plan=plan_json(plan),
        arms={
            name: Arm(losses=np.stack([one.losses[name] for one in ordered]), included=included)
            for name in ARMS
        },
        confidence=confidence,
        seconds=seconds,
        claims=tuple(c for c in (plan.certified(), paper_estimate(plan)) if c is not None),
    )


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
    """Every arm with every seed, one after the other."""
    started = time.perf_counter()
    runs = BlackBoxRuns(start, data, losses, setting, collate=collate)
    found = []
    for index in range(setting.num_seeds):
        found.append(runs.run(index))
        if on_progress is not None:
            on_progress(index + 1, setting.num_seeds)
    seconds = time.perf_counter() - started
    return gather_seeds(found, setting, seconds=seconds, confidence=confidence)
