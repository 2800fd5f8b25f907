"""What a user holds: the loop of the documentation, and what it refuses."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from shuffled_dpsgd.errors import (
    BudgetExhaustedError,
    CheckpointError,
    DivergenceError,
    InvalidArgumentError,
    UnsupportedModuleError,
)
from shuffled_dpsgd.training import (
    LoopSettings,
    PrivateTraining,
    ShuffledGaussianMechanism,
    make_private,
    save_checkpoint,
    train,
)
from shuffled_dpsgd.training.claims import SEEDED_TWICE
from training.cases import (
    Case,
    FixedSampler,
    bert_case,
    classify,
    distance,
    make_mlp,
    mlp_case,
    run,
    vectors,
    weights,
)


def private_mlp(lr: float = 0.1, **changes: Any) -> PrivateTraining:
    model = make_mlp()
    settings: dict[str, Any] = {
        "dataset_size": 40,
        "expected_batch_size": 8,
        "num_steps": 4,
        "delta": 1e-3,
        "noise_multiplier": 1.0,
        "shuffle": "off",
        "seed": 3,
        "physical_batch_size": 3,
    }
    return make_private(model, torch.optim.SGD(model.parameters(), lr=lr), **(settings | changes))


def test_types_names_and_forwards_stay_as_they_were() -> None:
    private = private_mlp()
    model, plain = private.model, make_mlp()
    run(private, mlp_case())
    private.close()
    assert type(model) is torch.nn.Sequential
    assert list(model.state_dict()) == list(plain.state_dict())
    assert all("forward" not in vars(module) for module in model.modules())
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    assert all(p.grad is None for p in model.parameters())
    assert not private.optimizer._optimizer_step_pre_hooks


def test_private_backward_and_plain_backward_are_the_same() -> None:
    finals = []
    for plainly in (True, False):
        private = private_mlp()
        for batch in private.batches(vectors()):
            losses = F.cross_entropy(private.model(batch.x), batch.y, reduction="none")
            if plainly:
                losses.sum().backward()
            else:
                private.backward(losses)
            private.step()
        finals.append(weights(private.model))
    assert distance(*finals) == 0.0


def test_the_size_of_physical_batches_does_not_matter() -> None:
    finals = []
    for size in (1, 4, 40):
        private = private_mlp(physical_batch_size=size)
        private.model.double()
        run(private, mlp_case(torch.float64))
        finals.append(weights(private.model))
    assert distance(finals[0], finals[1]) < 1e-14
    assert distance(finals[0], finals[2]) < 1e-14


def test_steps_happen_once_per_logical_batch_and_metrics_describe_them() -> None:
    private = private_mlp(num_steps=3, clip_norm=0.5)
    private.sampler = FixedSampler([0, 1, 2, 3, 4, 5, 6], [], [9])
    updates, seen = [], []
    private.on_update(lambda: seen.append(private.last_metrics))
    for batch in private.batches(vectors()):
        private.backward(classify(private.model, batch))
        updates.append(private.step())
    assert updates == [False, False, True, True]
    assert [metrics.batch_size for metrics in seen] == [7, 0, 1]
    full, empty, _ = seen
    assert full.loss == pytest.approx(1.1, abs=0.4)
    assert 0.0 <= full.clipped_share <= 1.0
    assert full.signal_to_noise > 0.0
    assert (empty.loss, empty.mean_norm, empty.signal_to_noise) == (None, None, 0.0)
    assert private.finished


def test_learning_rate_schedulers_keep_working() -> None:
    private = private_mlp(expected_batch_size=1)
    scheduler = torch.optim.lr_scheduler.StepLR(private.optimizer, step_size=1, gamma=0.5)
    private.on_update(scheduler.step)
    private.sampler = FixedSampler([1], [])
    run(private, mlp_case())
    assert private.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**4)


def test_a_run_stops_at_its_budget() -> None:
    private = private_mlp()
    run(private, mlp_case(), num_steps=3)
    assert (private.steps_taken, private.finished) == (3, False)
    run(private, mlp_case(), num_steps=3)
    assert (private.steps_taken, private.finished) == (4, True)
    with pytest.raises(BudgetExhaustedError, match="4 of the 4 releases"):
        private.batches(vectors())


class Witness:
    """Looks at the ledger on disk at the very moment a release is made."""

    def __init__(self, inner: ShuffledGaussianMechanism, path: Path) -> None:
        self._inner = inner
        self._path = path
        self.entries: list[int] = []

    def privatize(self, sums: Any, **more: Any) -> Any:
        self.entries.append(self._path.read_text().count("token"))
        return self._inner.privatize(sums, **more)


def test_the_ledger_is_written_ahead_of_every_release(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    private = private_mlp(ledger_path=path)
    witness = private.mechanism = Witness(private.mechanism, path)
    run(private, mlp_case())
    assert witness.entries == [1, 2, 3, 4]


def test_starting_a_seeded_run_again_with_other_settings_is_not_free(tmp_path: Path) -> None:
    """Step 0 starts from the same weights, so it is the same release; later ones are not."""
    path = tmp_path / "ledger.jsonl"
    run(private_mlp(num_steps=6, ledger_path=path), mlp_case(), num_steps=4)
    again = private_mlp(num_steps=6, ledger_path=path)
    run(again, mlp_case(), num_steps=4)
    assert again.ledger.spent == 4
    other = private_mlp(lr=0.2, num_steps=6, ledger_path=path)
    with pytest.raises(BudgetExhaustedError, match="release 7 of 6"):
        run(other, mlp_case())
    assert (other.steps_taken, other.ledger.spent, other.finished) == (3, 6, True)


def test_no_step_follows_a_release() -> None:
    private = private_mlp()
    run(private, mlp_case(), num_steps=1)
    private.release()
    with pytest.raises(InvalidArgumentError, match="release"):
        run(private, mlp_case())
    assert private.ledger.spent == 1


def test_data_of_another_size_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="40 records"):
        private_mlp().batches(vectors(count=41))


def test_batches_from_elsewhere_are_refused_or_not_certified() -> None:
    inputs, labels = vectors().tensors
    private = private_mlp()
    with private:
        private.backward(F.cross_entropy(private.model(inputs), labels, reduction="none"))
        with pytest.raises(InvalidArgumentError, match="sampler accounted for"):
            private.step()
    own = private_mlp(sampling="unaccounted")
    with own:
        own.backward(F.cross_entropy(own.model(inputs[:5]), labels[:5], reduction="none"))
        own.backward(F.cross_entropy(own.model(inputs[5:]), labels[5:], reduction="none"))
        assert own.step()
    assert own.last_metrics is not None
    assert own.last_metrics.batch_size == 40
    card = own.card()
    assert card.certified is None
    assert "not drawn by the Poisson sampler" in str(card)
    with pytest.raises(InvalidArgumentError, match="with private"):
        own.batches(vectors())


def test_a_forgotten_backward_or_step_is_noticed() -> None:
    private = private_mlp(physical_batch_size=40)
    stream = private.batches(vectors())
    next(stream)
    with pytest.raises(InvalidArgumentError, match="records drawn"):
        private.step()
    assert private.ledger.spent == 0
    with pytest.raises(InvalidArgumentError, match="no call for the batch"):
        next(stream)


def test_the_optimizer_cannot_be_stepped_around_the_mechanism() -> None:
    private = private_mlp()
    with pytest.raises(InvalidArgumentError, match=r"private\.step"):
        private.optimizer.step()
    private.close()
    private.optimizer.step()


def test_reduced_losses_are_refused_or_declared() -> None:
    private = private_mlp()
    stream = private.batches(vectors())
    batch = next(stream)
    losses = classify(private.model, batch)
    for wrong in (losses.mean(), losses[:-1], losses[:, None]):
        with pytest.raises(InvalidArgumentError, match="one loss per sample"):
            private.backward(wrong)
    finals = []
    for reduction in ("sum", "mean"):
        declared = private_mlp(loss_reduction=reduction)
        for batch in declared.batches(vectors()):
            losses = classify(declared.model, batch)
            declared.backward(losses.mean() if reduction == "mean" else losses)
            declared.step()
        finals.append(weights(declared.model))
        assert declared.last_metrics is not None
        assert declared.last_metrics.loss == pytest.approx(1.1, abs=0.4)
    assert distance(*finals) < 1e-6


def test_one_broken_record_is_survived_and_counted() -> None:
    data = vectors()
    data.tensors[0][5] = torch.nan
    private = private_mlp(num_steps=1)
    private.sampler = FixedSampler([4, 5, 6])
    for batch in private.batches(data):
        private.backward(classify(private.model, batch))
        private.step()
    assert private.last_metrics is not None
    assert private.last_metrics.num_nonfinite == 1
    assert all(torch.isfinite(p).all() for p in private.model.parameters())


@pytest.mark.filterwarnings("ignore:the most frequent row")
def test_divergence_stops_the_run_with_advice_before_spending() -> None:
    data = vectors()
    data.tensors[0][:] = torch.nan
    private = private_mlp()
    broken = Case(make=make_mlp, data=data, loss=classify)
    with pytest.raises(DivergenceError, match="smaller learning rate"):
        run(private, broken)
    assert private.ledger.spent == 0
    hot = private_mlp(lr=1e20, noise_multiplier=1e20)
    with pytest.raises(DivergenceError, match="no longer finite"):
        run(hot, mlp_case())
    assert hot.ledger.spent == hot.steps_taken == 1


def diverged_unseen() -> PrivateTraining:
    """A run whose first update breaks the weights, looked at as on a GPU: without waiting."""
    private = private_mlp(lr=1e20, noise_multiplier=1e20)
    with mock.patch.object(private._weights, "answer"):
        for batch in private.batches(vectors(), num_steps=2):
            private.backward(classify(private.model, batch))
            if private.step():
                break
    assert not all(torch.isfinite(p).all() for p in private.model.parameters())
    return private


def test_divergence_unseen_at_first_stops_the_next_release() -> None:
    private = diverged_unseen()
    with pytest.raises(DivergenceError, match=r"step 0: .* no longer finite"):
        run(private, mlp_case())
    assert private.ledger.spent == private.steps_taken == 1


def test_divergence_unseen_at_first_is_neither_released_nor_saved(tmp_path: Path) -> None:
    with pytest.raises(DivergenceError, match="no longer finite"):
        diverged_unseen().release()
    with pytest.raises(DivergenceError, match="no longer finite"):
        save_checkpoint(diverged_unseen(), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    private = diverged_unseen()
    with pytest.raises(DivergenceError, match="no longer finite"):
        list(private.batches(vectors(), num_steps=0))


class Remembering(torch.nn.Module):
    """Keeps a running mean of what it sees: data that would leave without noise."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(6, 3)
        self.register_buffer("seen", torch.zeros(6))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.seen.mul_(0.9).add_(inputs.mean(dim=0), alpha=0.1)
        return self.layer(inputs)


def test_buffers_that_soak_up_data_are_refused_before_anything_is_released() -> None:
    model = Remembering()
    private = make_private(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        dataset_size=40,
        expected_batch_size=8,
        num_steps=4,
        delta=1e-3,
        noise_multiplier=1.0,
        shuffle="off",
        seed=3,
    )
    with pytest.raises(UnsupportedModuleError, match=r"seen.*written"):
        run(private, Case(make=Remembering, data=vectors(), loss=classify))
    assert private.ledger.spent == 0


def test_secure_runs_differ_and_seeded_runs_repeat() -> None:
    finals = {}
    for name, seed in {"a": None, "b": None, "c": 1, "d": 1}.items():
        private = private_mlp(seed=seed)
        run(private, mlp_case())
        finals[name] = weights(private.model)
    assert distance(finals["a"], finals["b"]) > 0
    assert distance(finals["c"], finals["d"]) == 0


def test_only_renyi_accounting_needs_dp_accounting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    assert private_mlp(noise_multiplier=None, epsilon=0.123).card().private
    with pytest.raises(ImportError, match="dp_accounting"):
        private_mlp(noise_multiplier=None, epsilon=0.123, accounting="rdp")


def test_training_needs_no_accountant_when_the_noise_is_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: Any, **__: Any) -> float:
        raise AssertionError("priced")

    monkeypatch.setattr("shuffled_dpsgd.core.certified.price", refuse)
    monkeypatch.setattr("shuffled_dpsgd.accounting.calibration.price", refuse)
    private = private_mlp()
    train(private, vectors(), classify, settings=LoopSettings(price_steps=False))
    assert private.finished
    with pytest.raises(AssertionError, match="priced"):
        private_mlp(noise_multiplier=None, epsilon=0.123)


def test_dictionaries_go_straight_into_the_model() -> None:
    case = bert_case()
    model = case.make()
    private = make_private(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-3),
        dataset_size=40,
        expected_batch_size=8,
        epochs=1,
        epsilon=8.0,
        delta=1e-3,
        batch_clip_norm=4.0,
        seed=0,
    )
    assert len(run(private, case)) == private.plan.num_steps == 5
    card = private.card()
    assert card.certified is not None
    assert card.certified.epsilon <= 8.0
    assert card.steps_released == 5


def test_a_record_cannot_stand_in_for_another() -> None:
    """Backward twice over one physical batch, none over the next: the total would be right."""
    private = private_mlp()
    private.sampler = FixedSampler([0, 1, 2, 3, 4, 5])
    stream = private.batches(vectors())
    batch = next(stream)
    private.backward(classify(private.model, batch))
    private.backward(classify(private.model, batch))
    with pytest.raises(InvalidArgumentError, match="records drawn"):
        private.step()
    with pytest.raises(InvalidArgumentError, match="records drawn"):
        next(stream)
    assert private.ledger.spent == 0


def test_a_loop_given_up_cannot_disturb_the_next() -> None:
    """A debugger or a traceback may keep the old generator alive into the new loop."""
    private = private_mlp(num_steps=1)
    private.sampler = FixedSampler([0, 1, 2, 3, 4, 5])
    old = private.batches(vectors())
    next(old)
    for number, batch in enumerate(private.batches(vectors())):
        if number == 1:
            old.close()  # type: ignore[attr-defined]
        private.backward(classify(private.model, batch))
        private.step()
    assert private.last_metrics is not None
    assert private.last_metrics.batch_size == 6
    superseded, current = private_mlp(), private_mlp()
    first = superseded.batches(vectors())
    next(first)
    next(superseded.batches(vectors()))
    with pytest.raises(InvalidArgumentError, match="one loop"):
        next(first)
    current.close()


def test_one_bad_record_stops_nothing_even_alone() -> None:
    data = vectors()
    data.tensors[0][5] = float("nan")
    private = private_mlp(num_steps=1)
    private.sampler = FixedSampler([5])
    before = weights(private.model)
    run(private, Case(make=make_mlp, data=data, loss=classify))
    assert private.last_metrics is not None
    assert private.last_metrics.num_nonfinite == 1
    assert 0.0 < distance(before, weights(private.model)) < 1.0


def test_the_same_noise_on_other_sums_is_another_release(tmp_path: Path) -> None:
    """A seeded run over, from the same weights, with data or dropout masks that differ."""
    path = tmp_path / "ledger.jsonl"
    run(private_mlp(ledger_path=path), mlp_case(), num_steps=1)
    again = private_mlp(ledger_path=path)
    run(again, mlp_case(), num_steps=1)
    assert again.ledger.spent == 1
    data = vectors()
    data.tensors[0].add_(0.1)
    changed = private_mlp(ledger_path=path)
    run(changed, Case(make=make_mlp, data=data, loss=classify), num_steps=1)
    assert changed.ledger.spent == 2
    assert [entry.attempt for entry in changed.ledger.entries()] == [0, 1]
    assert distance(weights(changed.model), weights(again.model)) > 0.01, "its noise is its own"
    card = changed.card()
    assert card.certified is None
    assert card.why_not_certified == (SEEDED_TWICE,)


def project(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch.x).squeeze(-1)


@pytest.mark.filterwarnings("ignore:the most frequent row")
def test_data_and_their_negative_are_two_releases(tmp_path: Path) -> None:
    """Norms and sums of all gradients agree, and the noise cancels in the difference."""
    path = tmp_path / "ledger.jsonl"
    records = torch.tensor([1.0, -1.0]).expand(40, 2)
    released = []
    for sign in (1.0, -1.0):
        model = nn.Linear(2, 1, bias=False)
        nn.init.zeros_(model.weight)
        private = make_private(
            model,
            torch.optim.SGD(model.parameters(), lr=1.0),
            dataset_size=40,
            expected_batch_size=8,
            num_steps=2,
            noise_multiplier=1.0,
            delta=1e-3,
            shuffle="off",
            seed=3,
            ledger_path=path,
        )
        data = TensorDataset(sign * records, torch.zeros(40))
        run(private, Case(make=make_mlp, data=data, loss=project), num_steps=1)
        released.append(private.ledger.spent)
    assert released == [1, 2]


def test_nothing_public_can_be_matched_with_the_data(tmp_path: Path) -> None:
    """The same run on the same data: every token is another one, because every ledger's key is."""
    tokens = []
    for name in ("one", "two"):
        path = tmp_path / name / "ledger.jsonl"
        path.parent.mkdir()
        private = private_mlp(ledger_path=path)
        run(private, mlp_case(), num_steps=2)
        tokens.append({entry.token for entry in private.ledger.entries()})
        key = path.with_name("_ledger.jsonl.key")
        assert key.stat().st_mode & 0o077 == 0
        for public in (path.read_text(), private.card().dumps(), str(private.card())):
            assert key.read_bytes().hex() not in public
    assert not tokens[0] & tokens[1]


def test_a_ledger_whose_key_is_lost_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    run(private_mlp(ledger_path=path), mlp_case(), num_steps=1)
    path.with_name("_ledger.jsonl.key").unlink()
    with pytest.raises(CheckpointError, match=r"_ledger\.jsonl\.key: missing"):
        run(private_mlp(ledger_path=path), mlp_case())


def test_a_repetition_that_differs_cannot_overspend(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    run(private_mlp(num_steps=1, ledger_path=path), mlp_case())
    data = vectors()
    data.tensors[0].add_(0.1)
    changed = private_mlp(num_steps=1, ledger_path=path)
    before = weights(changed.model)
    with pytest.raises(BudgetExhaustedError, match="not one step"):
        train(changed, data, classify, settings=LoopSettings(price_steps=False))
    assert (changed.steps_taken, changed.released, changed.ledger.spent) == (0, False, 1)
    assert distance(before, weights(changed.model)) == 0.0


def test_the_card_says_when_the_shuffle_is_still_to_come() -> None:
    private = private_mlp(shuffle="at-release")
    run(private, mlp_case())
    assert "at-release (not yet applied)" in private.card().shuffle
    private.release()
    assert "not yet" not in private.card().shuffle


PARTS = ("plan", "engine", "sampler", "mechanism", "ledger", "streams", "referee")


@pytest.mark.parametrize("part", PARTS)
def test_nothing_is_claimed_once_a_part_was_replaced(part: str) -> None:
    """Nobody knows what another object does, also where it behaves, or is taken out again."""
    private = private_mlp()
    own = getattr(private, part)
    setattr(private, part, copy.copy(own))
    run(private, mlp_case(), num_steps=1)
    setattr(private, part, own)
    run(private, mlp_case())
    card = private.card()
    assert card.certified is None
    assert "(proven)" not in str(card)
    assert card.why_not_certified == (f"another object took the place of the run's {part}",)


def test_nothing_is_claimed_by_a_ledger_that_came_afterwards() -> None:
    private = private_mlp()
    run(private, mlp_case())
    assert private.card().certified is not None
    private.ledger = private_mlp().ledger
    assert private.card().certified is None
