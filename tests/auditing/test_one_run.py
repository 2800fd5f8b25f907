"""The noise of every step as one run shows it: near the truth, caught when weak, else refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from auditing.planted import bent_noise
from shuffled_dpsgd.auditing import alignment, canary_run
from shuffled_dpsgd.auditing.alignment import Realignment
from shuffled_dpsgd.auditing.canary_run import STEP_ASSUMPTIONS, STEP_BY_STEP, CanaryField
from shuffled_dpsgd.auditing.run import audit_one_run
from shuffled_dpsgd.auditing.target import AuditTarget, RunSetting
from shuffled_dpsgd.auditing.verdict import AuditReport
from shuffled_dpsgd.permutation import identity
from shuffled_dpsgd.training import make_private
from shuffled_dpsgd.training.private import PrivateTraining

DATA = TensorDataset(
    torch.randn(24, 6, generator=torch.Generator().manual_seed(0)),
    torch.randint(3, (24,), generator=torch.Generator().manual_seed(1)),
)


def losses(model: torch.nn.Module, batch: object) -> torch.Tensor:
    x, y = batch
    return torch.nn.functional.cross_entropy(model(x), y, reduction="none")


def start(size: int, **options: object) -> PrivateTraining:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(6, 64), torch.nn.ReLU(), torch.nn.Linear(64, 3))
    return make_private(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        dataset_size=size,
        expected_batch_size=size // 2,
        num_steps=6,
        delta=1e-4,
        clip_norm=0.5,
        loss=losses,
        **{"noise_multiplier": 1.0, "seed": 0, **options},
    )


def audited(plant=lambda private: None, canaries: int = 200, **options: object) -> AuditReport:
    def planted(size: int) -> PrivateTraining:
        private = start(size, **options)
        plant(private)
        return private

    target = AuditTarget(start=planted, data=DATA, losses=losses)
    setting = RunSetting(num_gradient_canaries=canaries, num_input_canaries=0)
    return audit_one_run(target, setting)


def of_steps(report: AuditReport):
    return [a for a in report.attacks if a.evidence.adversary == STEP_BY_STEP]


def test_it_comes_near_the_certified_claim_and_says_what_it_assumes() -> None:
    report = audited()
    (attack,) = of_steps(report)
    (bound,) = attack.bounds
    (certified, paper) = report.claims
    assert 0.7 * certified.epsilon < bound.epsilon <= certified.epsilon
    others = [b.epsilon for a in report.attacks if a is not attack for b in a.bounds]
    assert bound.epsilon > 2.0 * max(others)
    assert attack.evidence.assumptions == STEP_ASSUMPTIONS
    assert bound.refutes_such(certified)
    assert not bound.refutes_such(paper)
    assert bound.counts["num_steps"] == 6
    assert report.to_json()["attacks"][0]["assumptions"] == list(STEP_ASSUMPTIONS)
    assert not report.refutes_a_proven_claim
    card = report.card
    took = "an audit took the place of the run's engine, mechanism, referee, sampler"
    assert f"not checked: {took}" in str(card)
    assert card.verdicts["certified"] == "consistent with the audit"
    assert "(measured, if every step is Gaussian) by noise of every step" in str(card)


def test_the_scores_are_canary_and_noise_and_nothing_of_the_records() -> None:
    """Without noise they are one and zero, though records are in the sums."""
    target = AuditTarget(
        start=lambda size: start(size, noise_multiplier=1e-4), data=DATA, losses=losses
    )
    setting = RunSetting(num_gradient_canaries=50, num_input_canaries=0)
    run = canary_run.CanaryRun(target, setting)
    run.train()
    pair = run.evidence()[0].scores
    np.testing.assert_allclose(pair.present, 1.0, atol=1e-3)
    np.testing.assert_allclose(pair.out, 0.0, atol=1e-3)
    assert pair.num_out + pair.num_present == pytest.approx(50 * 6 / 2, abs=40)


def test_with_two_noise_levels_the_weaker_one_is_read() -> None:
    """The shuffled block has less noise; canaries are partly in the rest, and count for less."""
    options = {"accounting": "paper", "batch_clip_norm": 1e6, "noise_multiplier": 0.8}
    report = audited(unshuffled_noise_multiplier=3.0, **options)
    (attack,) = of_steps(report)
    certified = report.claims[0]
    assert certified.inputs["noise_multiplier"] == 0.8
    assert 0.5 * certified.epsilon < attack.bounds[0].epsilon <= certified.epsilon
    assert attack.evidence.scores.out.std() == pytest.approx(0.8, abs=0.1)


@pytest.mark.parametrize("share", [0.7, 0.25])
def test_weak_noise_refutes_the_proven_claim(share: float) -> None:
    report = audited(bent_noise(lambda _, std: share * std))
    assert report.refutes_a_proven_claim
    assert report.verdicts[0].strongest_attack.startswith(STEP_BY_STEP)


def shrunk(private: PrivateTraining) -> None:
    """Canaries enter the sums at a third: whoever injects them is bent."""
    whole = canary_run.CanaryRun._injected

    def injected(self, records):
        return {name: tensor / 3 for name, tensor in whole(self, records).items()}

    canary_run.CanaryRun._injected = injected


def lost(private: PrivateTraining) -> None:
    """The adversary matches weights with nothing and does not follow the shuffle."""
    alignment.realign = lambda spec, known, current: Realignment(
        permutation=identity(spec, "cpu"), tensors=current
    )


def parallel(private: PrivateTraining) -> None:
    """Canaries that share coordinates: each also lies in the direction of the next."""
    alone = CanaryField.sum_of

    def sum_of(self, active):
        spread = active | np.roll(active, 1)
        return alone(self, spread)

    CanaryField.sum_of = sum_of


@pytest.mark.parametrize(
    ("plant", "options", "reason"),
    [
        (lambda private: None, {"batch_clip_norm": 0.5}, "the batch clip shrank the sums"),
        (shrunk, {}, "a canary was not whole"),
        (parallel, {}, "a canary was not whole"),
        (lost, {}, "the shuffle was not followed"),
    ],
    ids=["batch clip", "shrunk", "not orthogonal", "not followed"],
)
def test_scores_that_depend_on_each_other_are_refused(
    plant, options, reason, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No bound, no part in a verdict, and the report says why."""
    for owner, name in (
        (canary_run.CanaryRun, "_injected"),
        (alignment, "realign"),
        (CanaryField, "sum_of"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # put back afterwards
    report = audited(plant, **options)
    assert of_steps(report) == []
    assert any(f"{STEP_BY_STEP}: not read" in note and reason in note for note in report.notes)
    assert report.reach is not None
    assert any(STEP_BY_STEP in line for line in report.reach.could_not)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"sampling": "unaccounted"}, "not drawn by the Poisson sampler"),
        ({"noise_multiplier": 0.0}, "no noise"),
    ],
)
def test_a_run_whose_claim_is_not_proven_is_refused(options: dict, reason: str) -> None:
    target = AuditTarget(start=lambda size: start(size, **options), data=DATA, losses=losses)
    setting = RunSetting(num_gradient_canaries=20, num_input_canaries=0)
    run = canary_run.CanaryRun(target, setting)
    assert any(reason in why for why in run.why_not_step_by_step)


def test_too_few_participations_are_refused() -> None:
    report = audited(canaries=2)
    if of_steps(report):
        pair = of_steps(report)[0].evidence.scores
        assert min(pair.num_out, pair.num_present) >= 2
    else:
        assert any("controls" in note for note in report.notes)


def test_the_bound_of_the_steps_does_not_depend_on_what_the_records_are() -> None:
    """Other records, the same noise and canaries: the same scores to rounding."""
    other = TensorDataset(5.0 + DATA.tensors[0], DATA.tensors[1].flip(0))
    found = []
    for data in (DATA, other):
        target = AuditTarget(start=start, data=data, losses=losses)
        setting = RunSetting(num_gradient_canaries=60, num_input_canaries=0)
        (attack,) = of_steps(audit_one_run(target, setting))
        found.append(attack.evidence.scores)
    np.testing.assert_allclose(found[0].present, found[1].present, atol=1e-3)
    np.testing.assert_allclose(found[0].out, found[1].out, atol=1e-3)


def test_a_bound_composed_over_another_run_refutes_nothing() -> None:
    report = audited()
    (bound,) = of_steps(report)[0].bounds
    longer = replace(
        report.claims[0], inputs={**report.claims[0].inputs, "num_steps": 7}, epsilon=0.0
    )
    assert not bound.refutes_such(longer)
