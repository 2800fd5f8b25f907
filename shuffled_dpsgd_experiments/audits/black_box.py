"""The knock-out: what a black box learns from a shuffled run, and from the same run unshuffled.

The shuffle preserves the model's function, and training commutes with it, so whoever only queries
the released model faces the same distribution with the shuffle and without. Here both are run over
many seeds, with the same records and the same membership attacks. Four arms per seed:

    off              no shuffle
    on               shuffle after every step, noise drawn in the shuffled frame: equal in law
    on-paired        the same with the noise of `off`, in the un-permuted frame: equal run by run
    without-privacy  neither clip nor noise: what the attacks reach where nothing protects

The audited records are canaries, each in the training data by a fair coin. Attacks: the loss
itself, and a likelihood ratio per record with the other seeds' runs as shadow models (Carlini et
al. 2022).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import t as student
from torch.utils.data import default_collate

from shuffled_dpsgd.accounting import PrivacyClaim
from shuffled_dpsgd.auditing.estimators import Inclusion, OneRunFDP, ScorePair, roc
from shuffled_dpsgd.auditing.estimators.curves import tpr_at_fpr
from shuffled_dpsgd.auditing.estimators.scores import Floats
from shuffled_dpsgd.auditing.input_canaries import (
    Extended,
    InputCanary,
    Leaving,
    check_kind,
    losses_of,
    plant,
)
from shuffled_dpsgd.auditing.run import claims_of
from shuffled_dpsgd.auditing.taps import OnProgress, train
from shuffled_dpsgd.auditing.target import AuditTarget
from shuffled_dpsgd.auditing.verdict import check_fields
from shuffled_dpsgd.core.plan import PrivacyPlan
from shuffled_dpsgd.tasks.audited import WITHOUT_PRIVACY
from shuffled_dpsgd.training.planning import plan_json
from shuffled_dpsgd.training.private import PrivateTraining

Start = Callable[[int, int, Mapping[str, Any]], PrivateTraining]
"""(data set size, seed, privacy options to change) -> a fresh run."""
PRIVATE_ARMS: dict[str, dict[str, Any]] = {
    "off": {"shuffle": "off", "noise_frame": "shuffled"},
    "on": {"shuffle": "every-step", "noise_frame": "shuffled"},
    "on-paired": {"shuffle": "every-step", "noise_frame": "unshuffled"},
}
PLAIN = "without-privacy"
ARMS = {**PRIVATE_ARMS, PLAIN: WITHOUT_PRIVACY}
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
        check_kind(self.input_canary)
        check_fields(self, num_seeds=LEAST_SEEDS, num_canaries=10)


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
        found = self._mean_of(self.areas("on", attack) - self.areas("off", attack))
        return {"mean_difference": found.pop("mean"), **found}

    def _mean_of(self, values: Floats) -> dict[str, float]:
        """Mean over seeds with Student's interval."""
        quantile = student.ppf(0.5 + self.confidence / 2.0, len(values) - 1)
        half = float(quantile * values.std(ddof=1) / len(values) ** 0.5)
        mean = float(values.mean())
        return {"mean": mean, "low": mean - half, "high": mean + half}

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
        """The largest one-run bound of any private run, arm and attack, at the joint level."""
        private = [arm for arm in self.arms if arm in PRIVATE_ARMS]
        level = (1.0 - self.confidence) / (self.num_seeds * len(private) * len(ATTACKS))
        return max(
            (max(self._bounds(arm, attack, confidence=1.0 - level)), f"{attack}, shuffle {arm}")
            for arm in private
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
            OneRunFDP()
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
                "area_over_seeds": self._mean_of(self.areas(name, attack)),
                "pooled_area": roc(pair).area,
                "pooled_tpr_at_1_percent_fpr": tpr_at_fpr(pair, 0.01).true_positive_rate,
            }
        level = (1.0 - self.confidence) / self.num_seeds
        bounds = self._bounds(name, "loss", confidence=1.0 - level)
        return {**shown, "largest_one_run_bound": {"epsilon": max(bounds), "kind": "measured"}}


def audit_black_box(
    start: Start,
    target: AuditTarget,
    setting: BlackBoxSetting,
    *,
    confidence: float = 0.95,
    on_progress: OnProgress | None = None,
) -> BlackBoxReport:
    """Every arm with every seed; canaries and coins are the same in all arms of a seed."""
    started, num_records = time.perf_counter(), len(target.data)
    coins = np.random.default_rng([setting.seed, 8])
    included = coins.random((setting.num_seeds, setting.num_canaries)) < 0.5
    losses: dict[str, list[Floats]] = {name: [] for name in ARMS}
    plans: dict[str, PrivacyPlan] = {}
    canaries: list[Any] = []
    for index in range(setting.num_seeds):
        for name, changes in ARMS.items():
            size, seed = num_records + setting.num_canaries, 1000 * setting.seed + index
            private = start(size, seed, changes)
            left_out = num_records + np.flatnonzero(~included[index])
            private.claims.audit_with(sampler=Leaving(private.sampler, left_out))
            plans[name] = private.plan
            if not canaries:
                rng = np.random.default_rng([setting.seed, 7])
                kind, count = setting.input_canary, setting.num_canaries
                canaries = plant(kind, target.data, count, rng, private.model)
            losses[name].append(_train_and_query(private, target, canaries))
        if on_progress is not None:
            on_progress(index + 1, setting.num_seeds)
    return BlackBoxReport(
        setting=setting,
        plan=plan_json(plans["on"]),
        arms={
            name: Arm(losses=np.stack(found), included=included) for name, found in losses.items()
        },
        confidence=confidence,
        seconds=time.perf_counter() - started,
        claims=claims_of(plans["on"]),
    )


def _train_and_query(private: PrivateTraining, target: AuditTarget, canaries: list[Any]) -> Floats:
    """The loss of every canary under the released model."""
    collate = target.collate or default_collate
    train(private, Extended(target.data, canaries), target.losses, collate)
    private.release()
    queried = losses_of(private, canaries, target.losses, collate)
    private.close()
    return queried
