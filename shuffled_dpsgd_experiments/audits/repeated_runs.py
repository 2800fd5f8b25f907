"""Whole runs, many times, with one canary that a coin puts in: the plain audit of a run's claim.

Each run is trained to the end of its plan from the same initial weights, with fresh noise, batches
and permutations. The canary is a gradient that joins steps at the run's own sampling rate; the
adversary follows the shuffle by re-aligning every pair of iterates and adds up the likelihood
ratios of the steps. No other record takes part, as in the worst case of the definition.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np

from shuffled_dpsgd.auditing.canary_run import CanaryRun
from shuffled_dpsgd.auditing.estimators import ClopperPearson, OrderStatistics, ScorePair
from shuffled_dpsgd.auditing.run import AuditTarget, claims_of
from shuffled_dpsgd.auditing.verdict import (
    AuditReport,
    Evidence,
    ThreatModel,
    report_on,
    require,
)
from shuffled_dpsgd.core.plan import PrivacyPlan
from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.training.planning import plan_json
from shuffled_dpsgd.training.private import PrivateTraining

LEAST_RUNS = 20


@dataclass(frozen=True, kw_only=True)
class RepeatedSetting:
    """`num_runs` whole runs, about half of them with the canary."""

    num_runs: int = 200
    seed: int = 0

    def __post_init__(self) -> None:
        require(self, num_runs=LEAST_RUNS)


@dataclass(frozen=True, kw_only=True)
class WholeRun:
    """What the adversary makes of one run, and whether the canary was in it."""

    index: int
    score: float
    included: bool
    recovered: float
    plan: PrivacyPlan


class RepeatedRuns:
    """Trains runs of one target, each by its number; `start` takes (data set size, seed)."""

    def __init__(
        self,
        target: AuditTarget,
        start: Callable[[int, int], PrivateTraining],
        setting: RepeatedSetting,
    ) -> None:
        self._target, self._start, self._setting = target, start, setting

    def run(self, index: int) -> WholeRun:
        """Run number `index`, whichever others are run, and where."""
        seed = 100_000 * (self._setting.seed + 1) + index
        run = CanaryRun(
            start=lambda size: self._start(size, seed),
            data=self._target.data,
            losses=self._target.losses,
            collate=self._target.collate,
            num_gradient_canaries=1,
            num_input_canaries=0,
            input_canary="mislabelled",
            other_records=False,
            seed=seed,
        )
        run.train()
        found = WholeRun(
            index=index,
            score=float(run.iterate_scores[0]),
            included=bool(run.included[0]),
            recovered=run.recovered,
            plan=run.private.plan,
        )
        run.private.close()
        return found


def gather_runs(
    found: Sequence[WholeRun],
    setting: RepeatedSetting,
    *,
    seconds: float,
    confidence: float = 0.95,
) -> AuditReport:
    """The report on the runs that were made, held against the claims about a whole run."""
    ordered = sorted(found, key=lambda one: one.index)
    scores = np.array([one.score for one in ordered])
    included = np.array([one.included for one in ordered], dtype=bool)
    if min(included.sum(), (~included).sum()) < LEAST_RUNS // 4:
        raise InvalidArgumentError(
            "num_runs", expected=f"at least {LEAST_RUNS // 4} in each world", got=len(ordered)
        )
    plan = ordered[0].plan
    evidence = Evidence(
        adversary="re-alignment along the run",
        canary="gradient",
        threat_model=ThreatModel.STEP_GRADIENTS,
        scores=ScorePair(out=scores[~included], present=scores[included]),
    )
    share = min(one.recovered for one in ordered)
    return replace(
        report_on(
            [evidence],
            (ClopperPearson(), OrderStatistics()),
            unit="whole runs, repeated",
            setting={
                **asdict(setting),
                "runs_without": int((~included).sum()),
                "runs_with": int(included.sum()),
                "plan": plan_json(plan),
            },
            claims=claims_of(plan),
            confidence=confidence,
            started=0.0,
            notes=(f"re-alignment recovered at least {share:.1%} of the permuted positions",),
        ),
        seconds=seconds,
    )
