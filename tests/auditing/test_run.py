"""Audits of real runs: canaries, threat models, re-alignment along the way, verdicts."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from shuffled_dpsgd.auditing.canary_run import CanaryField
from shuffled_dpsgd.auditing.input_canaries import (
    Extended,
    Leaving,
    blank,
    label_of,
    mislabelled,
    plant,
)
from shuffled_dpsgd.auditing.model_attacks import (
    normalised,
    random_direction,
    record_attack,
    step_attacks,
    widest_matrix,
)
from shuffled_dpsgd.auditing.probes import Prober
from shuffled_dpsgd.auditing.run import audit_one_run, audit_steps, card_bounds, step_claims
from shuffled_dpsgd.auditing.taps import trainable
from shuffled_dpsgd.auditing.target import AuditTarget, RunSetting
from shuffled_dpsgd.auditing.verdict import ThreatModel
from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.integrations.per_sample_loss import next_token_losses
from shuffled_dpsgd.models import build_model
from shuffled_dpsgd.tasks.classification import classification_task
from shuffled_dpsgd.tasks.data.loading import Splits
from shuffled_dpsgd.tasks.tokens import TokenCollate, TokenRecords, continuation_labels
from shuffled_dpsgd.training import make_private
from shuffled_dpsgd.training.budget import BudgetFile
from shuffled_dpsgd.training.private import PrivateTraining
from training.cases import mlp_case
from training.test_units import IDS, private_run


def data(size: int = 300) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(size, 1, 8, 8, generator=generator)
    return TensorDataset(images, torch.randint(10, (size,), generator=generator))


def target(budget: str | None = None, **privacy: object) -> AuditTarget:
    records = data()

    def fresh_model(seed: int) -> torch.nn.Module:
        return build_model("vit-digits", num_labels=10, device="cpu", seed=seed)

    task = classification_task(
        "noise",
        fresh_model(0),
        Splits(train=records, heldout={"test": records}),
        fresh_model=fresh_model,
    )

    def start(size: int):
        model = fresh_model(0)
        return make_private(
            model,
            torch.optim.SGD(model.parameters(), lr=0.05),
            dataset_size=size,
            expected_batch_size=60,
            num_steps=privacy.get("num_steps", 12),
            delta=1e-5,
            seed=0,
            **{key: value for key, value in privacy.items() if key != "num_steps"},
        )

    return AuditTarget(start=start, data=records, losses=task.losses, budget=budget)


@pytest.mark.parametrize("audit", [audit_one_run, audit_steps])
def test_an_audit_counts_itself_with_the_steps_that_see_the_records(
    audit: Any, tmp_path: Path
) -> None:
    file = BudgetFile(tmp_path / "b.json")
    file.create(delta=1e-5, epsilon=None, adjacency="add-remove")
    aimed = target(epsilon=1.0, num_steps=4, budget=str(file.path))
    setting = RunSetting(
        num_gradient_canaries=20, num_input_canaries=0, num_observations=20, warmup_steps=3
    )
    audit(aimed, setting)
    (entry,) = file.read().runs
    assert entry.num_steps == (4 if audit is audit_one_run else 3)
    assert entry.ending == "finished"
    with pytest.raises(InvalidArgumentError, match="gradient canaries alone"):
        audit(aimed, replace(setting, num_input_canaries=1))
    alone = replace(setting, other_records=False, warmup_steps=0)
    audit(aimed, alone)
    assert len(file.read().runs) == 1


@pytest.mark.parametrize("audit", [audit_one_run, audit_steps])
@pytest.mark.parametrize("shared", [{"noise": "banded", "bands": 2}, {"largest_batch": 72}])
def test_steps_that_share_noise_or_draws_are_refused_before_anything_is_spent(
    audit: Any, shared: dict[str, Any], tmp_path: Path
) -> None:
    """Alone, a step of theirs has other noise than the claim is about."""
    file = BudgetFile(tmp_path / "b.json")
    file.create(delta=1e-5, epsilon=None, adjacency="add-remove")
    aimed = target(noise_multiplier=1.0, num_steps=4, budget=str(file.path), **shared)
    setting = RunSetting(num_gradient_canaries=20, num_input_canaries=0, num_observations=20)
    with pytest.raises(InvalidArgumentError, match=r"draws of their own|largest_batch"):
        audit(aimed, setting)
    assert not file.read().runs


def of_units(noise: float, *, planned: float | None = None) -> AuditTarget:
    """Seven units of forty records; with `planned` that noise is claimed and `noise` is added."""
    case = mlp_case(torch.float32)

    def start(size: int) -> PrivateTraining:
        private = private_run(
            case, case.make(), dataset_size=size, num_steps=12, noise_multiplier=planned or noise
        )
        if planned is not None:
            block = replace(private.plan.blocks[0], noise_multiplier=noise)
            private.mechanism.plan = replace(private.plan, blocks=(block,))
        return private

    return AuditTarget(start=start, data=case.data, losses=case.loss, num_units=len(set(IDS)))


@pytest.mark.parametrize("planned", [None, 4.0])
def test_units_are_audited_by_canaries_that_stand_for_units(planned: float | None) -> None:
    setting = RunSetting(num_gradient_canaries=50, num_input_canaries=0)
    report = audit_one_run(of_units(1.0, planned=planned), setting)
    (certified,) = (each for each in report.verdicts if each.claim.kind == "proven")
    assert certified.refuted == (planned is not None)
    assert certified.strongest_attack == "noise of every step (gradient)"
    assert certified.strongest_bound > 0.5
    assert "every canary stands for a unit, all of its records together" in report.notes
    assert report.claims[0].inputs["sampling_prob"] == 5 / 9


@pytest.mark.parametrize("audit", [audit_one_run, audit_steps])
def test_copies_of_records_are_no_units(audit: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="units: expected gradient canaries alone"):
        audit(of_units(1.0), RunSetting(num_gradient_canaries=20, num_input_canaries=1))


@pytest.mark.slow
def test_paper_calibrated_steps_are_refuted_and_certified_ones_are_not() -> None:
    aimed = target(epsilon=1.0, accounting="paper", batch_clip_norm=1.0)
    report = audit_steps(aimed, RunSetting(num_observations=100, warmup_steps=2))
    outcomes = {verdict.claim.kind: verdict.outcome for verdict in report.verdicts}
    assert outcomes == {"proven": "consistent", "heuristic": "refuted at 95 %"}
    found = {attack.label: attack.bounds for attack in report.attacks}
    assert "if every step is Gaussian" in report.notes[0]
    fixed = found["fixed index (dirac)"]
    assert [b.epsilon for b in fixed if b.method == "clopper-pearson"] == [0.0]


def test_one_run_at_little_noise_finds_the_canaries_through_the_shuffle() -> None:
    aimed = target(noise_multiplier=0.05, num_steps=20)
    setting = RunSetting(num_gradient_canaries=300, num_input_canaries=20)
    report = audit_one_run(aimed, setting)
    assert not report.refutes_a_proven_claim
    by_threat = {attack.evidence.threat_model: attack for attack in report.attacks}
    assert set(by_threat) == {
        ThreatModel.MECHANISM_OUTPUT,
        ThreatModel.STEP_GRADIENTS,
        ThreatModel.FINAL_WITH_INITIAL,
        ThreatModel.FINAL_WITHOUT_INITIAL,
        ThreatModel.BLACK_BOX,
    }
    for threat in set(by_threat) - {ThreatModel.FINAL_WITHOUT_INITIAL, ThreatModel.BLACK_BOX}:
        assert by_threat[threat].bounds[0].epsilon > 2.0
    assert report.notes == (
        "re-alignment along the run recovered 100.0% of the permuted positions",
    )


def test_one_run_certified_for_one_is_consistent_and_fills_the_card() -> None:
    aimed = target(epsilon=1.0)
    report = audit_one_run(aimed, RunSetting(num_gradient_canaries=200, num_input_canaries=20))
    assert not report.refutes_a_proven_claim
    assert report.card is not None
    assert report.card.verdicts["certified"] == "consistent with the audit"
    assert "measured" in str(report.card)
    assert len(report.card.audits) == len(report.attacks)
    assert report.card.audits == card_bounds(report.attacks, confidence=0.95)
    assert "95% confidence" in str(report.card)


@pytest.mark.slow
def test_one_run_without_shuffle_or_at_release_reads_the_same_canaries() -> None:
    for shuffle in ("off", "at-release"):
        aimed = target(noise_multiplier=0.05, num_steps=15, shuffle=shuffle)
        report = audit_one_run(aimed, RunSetting(num_gradient_canaries=200, num_input_canaries=0))
        final = {a.evidence.threat_model: a.bounds[0].epsilon for a in report.attacks}
        assert final[ThreatModel.FINAL_WITH_INITIAL] > 1.5


def test_progress_is_reported() -> None:
    seen: list[tuple[int, int]] = []
    aimed = target(noise_multiplier=1.0, num_steps=3)
    setting = RunSetting(num_gradient_canaries=10, num_input_canaries=0)
    audit_one_run(aimed, setting, on_progress=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 3), (2, 3), (3, 3)]


def test_canary_field_is_orthonormal() -> None:
    like = {"a": torch.zeros(5, 7), "b": torch.zeros(30)}
    field = CanaryField(like, 6, np.random.default_rng(0))
    gram = np.stack([field.read(field.sum_of(np.eye(6, dtype=bool)[j])) for j in range(6)])
    np.testing.assert_allclose(gram, np.eye(6), atol=1e-12)
    partial = field.read(field.sum_of(np.ones(6, dtype=bool)), only=frozenset({"a"}))
    assert (partial < 1.0).all()
    with pytest.raises(InvalidArgumentError, match="count"):
        CanaryField(like, 60, np.random.default_rng(0))


def test_model_canaries_have_norm_one_and_probes_see_them() -> None:
    private = target(noise_multiplier=1e-6).start(300)
    weights = trainable(private.model)
    prober = Prober(private, seed=0)
    for attack in step_attacks(weights, private.spec, seed=0):
        norm = sum(float(t.square().sum()) for t in attack.canary.values())
        assert norm == pytest.approx(1.0)
        if attack.name != "fixed index":
            assert attack.read(prober.release(attack.canary)) == pytest.approx(1.0, abs=1e-2)
            assert attack.read(prober.release(None)) == pytest.approx(0.0, abs=1e-2)


def test_a_record_is_found_through_adamw_and_the_shuffle() -> None:
    aimed = target(noise_multiplier=1e-4)
    private = aimed.start(300)
    record = mislabelled(aimed.data, 1, np.random.default_rng(0))[0]
    attack = record_attack(private, record, aimed.losses, None, kind="mislabelled")
    assert attack.contribution is not None
    norm = sum(float(t.square().sum()) for t in attack.canary.values())
    assert norm <= 1.0 + 1e-6
    prober = Prober(private, seed=0)
    found = attack.read(prober.release(attack.contribution()))
    assert found == pytest.approx(norm, abs=1e-2)
    assert attack.read(prober.release(None)) == pytest.approx(0.0, abs=1e-2)


def test_in_the_full_scope_sums_run_over_every_axis_that_moves() -> None:
    private = target(noise_multiplier=1e-6, scope="full").start(300)
    prober = Prober(private, seed=0)
    for attack in step_attacks(trainable(private.model), private.spec, seed=0):
        if attack.name in ("axis sum", "orbit maximum"):
            assert attack.read(prober.release(attack.canary)) == pytest.approx(1.0, abs=1e-3)


@pytest.mark.slow
def test_canaries_alone_are_not_shrunk_by_the_records_of_their_batch() -> None:
    """The same run at the paper's noise shows nothing among records, and the claim's end alone."""
    aimed = target(epsilon=1.0, accounting="paper", batch_clip_norm=1.0, num_steps=25)
    bounds = {}
    for others in (True, False):
        setting = RunSetting(num_gradient_canaries=24, num_input_canaries=0, other_records=others)
        report = audit_one_run(aimed, setting)
        bounds[others] = max(b.epsilon for b in report.attacks[0].bounds)
        assert not report.refutes_a_proven_claim
    assert bounds[True] < bounds[False]


def test_widest_axis_and_given_directions() -> None:
    private = target(noise_multiplier=1.0).start(300)
    weights = trainable(private.model)
    moved = {name: weights[name] for name in private.spec.moved_names}
    parameter = widest_matrix(private.spec, moved)
    assert max(group.size for group in private.spec.groups) in weights[parameter].shape
    with pytest.raises(InvalidArgumentError, match="axis"):
        widest_matrix(private.spec, {})
    with pytest.raises(InvalidArgumentError, match="non-zero"):
        normalised({"w": torch.zeros(3)})
    drawn = random_direction({"w": torch.zeros(2, 3)}, torch.Generator().manual_seed(0))
    assert float(drawn["w"].norm()) == pytest.approx(1.0)


def test_step_claims_follow_the_plan() -> None:
    plan = target(epsilon=1.0, accounting="paper", batch_clip_norm=1.0).start(300).plan
    certified, paper = step_claims(plan)
    assert (certified.kind, paper.kind) == ("proven", "heuristic")
    assert certified.delta == paper.delta
    assert certified.inputs["noise_multiplier"] == plan.smallest_noise_multiplier


def test_records_left_out_are_never_drawn_and_change_nothing_else() -> None:
    sampler = target(noise_multiplier=1.0).start(300).sampler
    left_out = np.array([3, 5, 299])
    leaving = Leaving(sampler, left_out)
    assert leaving.dataset_size == 300
    for step in range(20):
        drawn = sampler.indices(step).tolist()
        assert leaving.indices(step).tolist() == [i for i in drawn if i not in left_out]


def test_input_canaries() -> None:
    records, rng = data(40), np.random.default_rng(0)
    wrong = mislabelled(records, 10, rng)
    originals = {tuple(x.flatten().tolist()): int(y) for x, y in records}
    assert all(originals[tuple(x.flatten().tolist())] != int(y) for x, y in wrong)
    assert all(not x.any() for x, _ in blank(records, 5, rng))
    extended = Extended(records, wrong)
    assert len(extended) == 50
    assert torch.equal(extended[41][0], wrong[1][0])
    assert torch.equal(extended[3][0], records[3][0])
    assert label_of(([1, 2], 3)) == 3
    with pytest.raises(InvalidArgumentError, match="pair"):
        label_of({"labels": 3})
    with pytest.raises(InvalidArgumentError, match="blank"):
        blank([([1, 2], 0), ([3], 1)], 1, rng)
    with pytest.raises(InvalidArgumentError, match="count"):
        mislabelled(records, 41, rng)


def continuations(vocabulary: int = 60, count: int = 40) -> list[tuple[list[int], int]]:
    rng = np.random.default_rng(0)
    return [(rng.integers(vocabulary, size=9).tolist(), 4) for _ in range(count)]


def test_new_tokens_are_in_no_record_and_no_other_canary() -> None:
    model = build_model("gpt2-tiny", num_labels=None, device="cpu")
    records, rng = continuations(), np.random.default_rng(1)
    canaries = plant("new-token", records, 30, rng, model)
    used = {token for ids, _ in records for token in ids}
    last = [ids[-1] for ids, _ in canaries]
    assert len(set(last)) == 30
    assert not used & set(last)
    assert max(last) < model.config.vocab_size
    prompts = [ids[:prompt] for ids, prompt in records]
    assert all(ids[:-1] in prompts and len(ids) == prompt + 1 for ids, prompt in canaries)
    with pytest.raises(InvalidArgumentError, match="tokens of the vocabulary"):
        plant("new-token", continuations(vocabulary=370, count=400), 30, rng, model)
    with pytest.raises(InvalidArgumentError, match="length of the prompt"):
        plant("new-token", data(40), 10, rng, model)
    with pytest.raises(InvalidArgumentError, match="language model"):
        plant("new-token", records, 10, rng, torch.nn.Linear(2, 2))


def language_target(**privacy: object) -> AuditTarget:
    """A tiny GPT-2 that continues prompts, as the causal-lm task trains it."""
    initial = build_model("gpt2-tiny", num_labels=None, device="cpu")

    def start_with(options: dict[str, object]):
        def start(size: int):
            model = copy.deepcopy(initial)
            return make_private(
                model,
                torch.optim.AdamW(model.parameters(), lr=1e-2),
                dataset_size=size,
                expected_batch_size=20,
                num_steps=25,
                delta=1e-4,
                seed=0,
                **options,
            )

        return start

    def losses(model: torch.nn.Module, batch: object) -> torch.Tensor:
        inputs, labels = batch
        return next_token_losses(model(**inputs).logits, labels)

    return AuditTarget(
        start=start_with({"clip_norm": 1.0, **privacy}),
        start_plain=start_with({"clip_norm": math.inf, "noise_multiplier": 0.0, "shuffle": "off"}),
        data=TokenRecords(continuations()),
        losses=losses,
        collate=TokenCollate(pad_id=0, labels=continuation_labels),
    )


@pytest.mark.slow
def test_new_tokens_tell_members_of_a_language_model_apart_and_privacy_hides_them() -> None:
    setting = RunSetting(num_gradient_canaries=20, num_input_canaries=40, input_canary="new-token")
    found = audit_one_run(language_target(noise_multiplier=4.0), setting).membership
    assert found.canary == "new-token input"
    assert found.num_records == 40
    assert found.without_privacy.low > 0.8
    assert found.with_privacy.high < found.without_privacy.low
    assert found.to_json()["without_privacy"]["kind"] == "measured"


@pytest.mark.slow
def test_new_tokens_are_stronger_than_scrambled_continuations() -> None:
    """The reason to have them: with a little noise, the same run shows more of its members."""
    areas = {}
    for kind in ("new-token", "scrambled"):
        setting = RunSetting(num_gradient_canaries=20, num_input_canaries=40, input_canary=kind)
        report = audit_one_run(language_target(noise_multiplier=0.3), setting)
        areas[kind] = report.membership.with_privacy
    assert areas["new-token"].area > areas["scrambled"].area
