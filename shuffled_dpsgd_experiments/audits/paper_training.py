"""The paper's audit inside real training, as it describes it, with a strong one beside it.

Every step of a run with the paper's noise, batch clip and shuffle takes part: a fair coin decides
whether a Dirac canary joins the step's clipped sum, and the adversary reads the released gradient
at the index where it was planted. Beside that reading stand an adversary that follows the shuffle
by re-alignment through the same releases, and, at the weights where training ended, the attacks of
a step audit, whose other records contribute nothing.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass

import numpy as np
import torch

from shuffled_dpsgd.auditing.alignment import ShuffleFollower
from shuffled_dpsgd.auditing.estimators import ScorePair
from shuffled_dpsgd.auditing.model_attacks import inner, orbit_canary, step_attacks, widest_axis
from shuffled_dpsgd.auditing.probes import Prober, probe
from shuffled_dpsgd.auditing.run import AuditTarget, step_claims
from shuffled_dpsgd.auditing.step import ESTIMATORS
from shuffled_dpsgd.auditing.taps import OnProgress, Tensors, tap, train, trainable
from shuffled_dpsgd.auditing.verdict import (
    AuditReport,
    Evidence,
    ThreatModel,
    report_on,
    require_at_least,
)
from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.permutation import Permutation, apply_to_tensors
from shuffled_dpsgd.training.planning import plan_json
from shuffled_dpsgd.training.private import PrivateTraining


@dataclass(frozen=True, kw_only=True)
class TrainingSetting:
    """`num_observations` releases in each world for the strong attacks after training."""

    num_observations: int = 200
    seed: int = 0

    def __post_init__(self) -> None:
        require_at_least(self, num_observations=20)


class WatchedRun:
    """A run whose every step may carry the canary; scores by what was read and by the coin."""

    def __init__(self, private: PrivateTraining, *, seed: int) -> None:
        spec = private.spec
        if spec is None or private.plan.shuffle != "every-step":
            raise InvalidArgumentError(
                "private", expected="a run that shuffles every step", got=private.plan
            )
        self.private, self._shuffle = private, ShuffleFollower(private)
        self._rng = np.random.default_rng([seed, 6])
        weights = trainable(private.model)
        moved = {n: w for n, w in weights.items() if n in spec.moved_names}
        self.parameter, axis = widest_axis(spec, moved)
        self._dirac = {self.parameter: orbit_canary(weights[self.parameter], (axis,), 1)}
        self._place = self._dirac[self.parameter].nonzero()[0].tolist()
        self._joined = False
        self.coins: list[bool] = []
        self.fixed: list[float] = []
        self.followed: list[float] = []
        self._recorder = tap(private, self._injected)

    def train(self, target: AuditTarget, on_progress: OnProgress | None) -> None:
        train(
            self.private,
            target.data,
            target.losses,
            target.collate,
            watch=self._observe,
            on_progress=on_progress,
        )

    def scores(self, read: list[float]) -> ScorePair:
        values, coins = np.array(read), np.array(self.coins)
        return ScorePair(out=values[~coins], present=values[coins])

    def _injected(self, records: Tensors) -> dict[str, torch.Tensor]:
        """The canary, where this step's frame has it, if the coin says so."""
        self._joined = bool(self._rng.random() < 0.5)
        canary = {n: t.clone() * self.private.plan.clip_norm for n, t in self._dirac.items()}
        self._move(canary, self._shuffle.true)
        return canary if self._joined else {}

    def _observe(self) -> None:
        """Read this step's release: at the planted index, and where re-alignment says it went."""
        private, before = self.private, self._shuffle.true
        scale = private.plan.expected_batch_size / private.plan.clip_norm
        noisy = {self.parameter: self._recorder.last[self.parameter].clone() * scale}
        expected = {name: tensor.clone() for name, tensor in self._dirac.items()}
        self._move(expected, self._shuffle.found)
        self.followed.append(inner(expected, noisy))
        self._shuffle.follow()
        self._move(noisy, before, back=True)
        self._move(noisy, self._shuffle.true)
        self.fixed.append(float(noisy[self.parameter][tuple(self._place)]))
        self.coins.append(self._joined)

    def _move(
        self, tensors: dict[str, torch.Tensor], to: Permutation | None, *, back: bool = False
    ) -> None:
        assert to is not None
        apply_to_tensors(to.inverse() if back else to, tensors)


def audit_paper_training(
    target: AuditTarget,
    setting: TrainingSetting,
    *,
    confidence: float = 0.95,
    on_progress: OnProgress | None = None,
) -> AuditReport:
    """Train to the end of the plan under observation, then attack one step of the result."""
    started = time.perf_counter()
    watched = WatchedRun(target.start(len(target.data)), seed=setting.seed)
    watched.train(target, on_progress)
    private, plan = watched.private, watched.private.plan
    evidence = [
        Evidence(
            adversary="fixed index, during training",
            canary="dirac",
            threat_model=ThreatModel.STEP_GRADIENTS,
            scores=watched.scores(watched.fixed),
        ),
        Evidence(
            adversary="re-alignment, during training",
            canary="dirac",
            threat_model=ThreatModel.ITERATES,
            scores=watched.scores(watched.followed),
        ),
        *probe(
            Prober(private, seed=setting.seed),
            step_attacks(trainable(private.model), private.spec, seed=setting.seed),
            count=setting.num_observations,
        ),
    ]
    claims = step_claims(plan)
    private.close()
    return report_on(
        evidence,
        ESTIMATORS,
        unit=f"a training run of {plan.num_steps} steps, observed at every step",
        setting={**asdict(setting), "plan": plan_json(plan)},
        claims=claims,
        delta=claims[0].delta,
        confidence=confidence,
        started=started,
        notes=(
            "during training the batch clip shrinks the canary with the batch it joined; "
            "after it, the other records of the attacked step contribute nothing",
        ),
    )
