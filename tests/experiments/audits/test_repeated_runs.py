"""Whole runs, repeated, with a canary and without."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shuffled_dpsgd.auditing.run import AuditTarget
from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.training import make_private
from shuffled_dpsgd_experiments.audits.repeated_runs import (
    RepeatedRuns,
    RepeatedSetting,
    gather_runs,
)
from shuffled_dpsgd_experiments.audits.targets import cross_entropies

RECORDS = torch.utils.data.TensorDataset(torch.randn(40, 1, 8, 8), torch.randint(10, (40,)))


def start(size: int, seed: int, **privacy: object):
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)
    )
    return make_private(
        model,
        torch.optim.SGD(model.parameters(), lr=0.05),
        dataset_size=size,
        expected_batch_size=20,
        num_steps=3,
        delta=1e-4,
        clip_norm=1.0,
        seed=seed,
        **(privacy or {"noise_multiplier": 0.2}),
    )


def audit_repeated_runs(start, setting: RepeatedSetting):
    runs = RepeatedRuns(TARGET, start, setting)
    found = [runs.run(index) for index in range(setting.num_runs)]
    return gather_runs(found, setting, seconds=1.0)


TARGET = AuditTarget(start=lambda size: start(size, 0), data=RECORDS, losses=cross_entropies)


@pytest.mark.slow
def test_little_noise_is_seen_and_the_proven_claim_stands() -> None:
    report = audit_repeated_runs(start, RepeatedSetting(num_runs=60))
    (attack,) = report.attacks
    assert 0.5 < attack.strongest_against(report.claims[0]) < report.claims[0].epsilon
    assert [v.outcome for v in report.verdicts if v.claim.kind == "proven"] == ["consistent"]
    made = report.setting["runs_with"] + report.setting["runs_without"]
    assert made == 60
    assert report.notes == ("re-alignment recovered at least 100.0% of the permuted positions",)


@pytest.mark.slow
def test_the_papers_claim_about_a_run_is_refuted() -> None:
    def paper(size: int, seed: int):
        return start(size, seed, epsilon=0.3, accounting="paper", batch_clip_norm=1.0)

    report = audit_repeated_runs(paper, RepeatedSetting(num_runs=80))
    outcomes = {verdict.claim.kind: verdict.outcome for verdict in report.verdicts}
    assert outcomes == {"proven": "consistent", "heuristic": "refuted at 95 %"}


def test_a_run_depends_on_its_number_alone() -> None:
    runs = RepeatedRuns(TARGET, start, RepeatedSetting(num_runs=20))
    first, second, again = runs.run(0), runs.run(1), runs.run(0)
    assert first.score == again.score
    assert first.included == again.included
    assert not np.isclose(first.score, second.score)


def test_too_few_runs_give_no_report() -> None:
    with pytest.raises(InvalidArgumentError, match="num_runs"):
        gather_runs([], RepeatedSetting(), seconds=0.0)
