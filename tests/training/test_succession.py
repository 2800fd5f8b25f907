"""A second run on a model or on the same rows: nothing that was spent is forgotten."""

from __future__ import annotations

import gc
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from shuffled_dpsgd.accounting import SampledGaussian, claim_together
from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.runtime import notices
from shuffled_dpsgd.training import (
    Batch,
    PrivateTraining,
    load_checkpoint,
    make_private,
    save_checkpoint,
    succession,
)
from shuffled_dpsgd.training.saved_card import card_from_json
from training.cases import Case, classify, make_mlp, mlp_case, run, vectors


@pytest.fixture(autouse=True)
def fresh_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests train on the same rows."""
    monkeypatch.setattr(succession, "_ON_ROWS", [])
    monkeypatch.setattr(notices, "_said", set())


def start(model: torch.nn.Module, **changes: Any) -> PrivateTraining:
    settings: dict[str, Any] = {
        "dataset_size": 40,
        "expected_batch_size": 10,
        "num_steps": 3,
        "delta": 1e-3,
        "noise_multiplier": 1.0,
        "shuffle": "off",
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return make_private(model, optimizer, **(settings | changes))


def together(number: int) -> float:
    run = SampledGaussian(noise_multiplier=1.0, sampling_prob=0.25, num_steps=3)
    return claim_together([run] * number, 1e-3).epsilon


def epsilon(private: PrivateTraining) -> float:
    certified = private.card().certified
    assert certified is not None
    return certified.epsilon


def test_a_cell_run_again_adds_up_on_the_card() -> None:
    """Closed, forgotten and collected runs count: the weights carry what they released."""
    case, model = mlp_case(), make_mlp()
    for number in range(1, 4):
        private = start(model)
        run(private, case)
        assert epsilon(private) == together(number)
        private.close()
        del private
        gc.collect()
    last = start(model)
    assert epsilon(last) == together(3), "before its first step"
    run(last, Case(make=case.make, data=vectors(), loss=classify), num_steps=1)
    text = str(last.card())
    assert "by PLD of 4 runs" in text
    certified, so_far = last.card().certified, last.card().certified_so_far
    assert certified is not None
    assert so_far is not None
    assert certified.delta == 1e-3
    assert together(3) < so_far.epsilon < certified.epsilon == together(4)
    assert last.card().exactness is None
    assert last.card().meaning is not None
    assert last.card().meaning.add_remove.epsilon == certified.epsilon  # type: ignore[union-attr]
    saved = json.loads(last.card().dumps())
    assert card_from_json(saved) == last.card()
    saved["certified"]["inputs"]["runs"][-1]["num_steps"] = 1
    with pytest.raises(ValueError, match="not that of its plan"):
        card_from_json(saved)


def test_a_fresh_model_on_the_same_rows_says_what_the_rows_gave_before() -> None:
    case = mlp_case()
    first, second = start(make_mlp()), start(make_mlp())
    run(first, case)
    run(second, case)
    assert epsilon(second) == epsilon(first)
    said = f"1 earlier run of this process on these rows, other models: ε = {together(2):.4g}"
    assert any(said in line for line in second.card().not_covered)


def test_a_cell_run_five_times_is_five_runs_and_its_owner_learns_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for number in range(1, 6):
        private = start(make_mlp())
        run(private, mlp_case())
        private.close()
        assert (f"run {number} of this program on these records" in caplog.text) == (number > 1)
    assert f"{together(5):.4g} (proven)" in str(private.card())


def wrapped(model: torch.nn.Module) -> torch.nn.Module:
    return torch.nn.Sequential(model)


def sharing_storage(model: torch.nn.Module) -> torch.nn.Module:
    other = make_mlp()
    for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
        mine.data = theirs.data
    return other


def frozen_inside(model: torch.nn.Module) -> torch.nn.Module:
    model.requires_grad_(False)
    return torch.nn.Sequential(model, torch.nn.Linear(3, 3))


@pytest.mark.parametrize("around", [wrapped, sharing_storage, frozen_inside])
def test_the_same_weights_in_another_model_carry_what_they_released(around: Any) -> None:
    model = make_mlp()
    first = start(model, seed=3)
    run(first, mlp_case())
    first.close()
    other = around(model)
    second = start(other)
    run(second, Case(make=lambda: other, data=vectors(), loss=classify))
    assert epsilon(second) == together(2)
    second.close()
    with pytest.raises(InvalidArgumentError, match="the seed of an earlier run"):
        run(start(other, seed=3), mlp_case())


def test_rows_in_another_order_or_with_more_of_them_are_the_same_records() -> None:
    """Strangers share no row, and are not counted."""
    first = start(make_mlp())
    run(first, mlp_case())
    inputs, labels = vectors().tensors
    order = torch.randperm(len(labels))
    more = torch.utils.data.TensorDataset(inputs[order][:-1], labels[order][:-1])
    strangers = torch.utils.data.TensorDataset(inputs + 1.0, labels)
    for data, known in ((more, True), (strangers, False)):
        second = start(make_mlp(), dataset_size=len(data))
        run(second, Case(make=make_mlp, data=data, loss=classify))
        assert any("1 earlier run" in line for line in second.card().not_covered) == known


class Augmented(torch.utils.data.Dataset[Any]):
    """Rows that differ from load to load, by a generator of their own."""

    def __init__(self) -> None:
        self.inputs, self.labels = vectors().tensors
        self.draws = random.Random()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Any:
        return self.inputs[index] + self.draws.random(), self.labels[index]


def test_a_data_set_is_known_again_where_its_rows_are_not() -> None:
    data = Augmented()
    for number, rows in enumerate((data, data, Augmented())):
        private = start(make_mlp())
        run(private, Case(make=make_mlp, data=rows, loss=classify), num_steps=1)
        known = any("1 earlier run" in line for line in private.card().not_covered)
        assert known == (number == 1)


def test_runs_on_other_rows_are_added_too() -> None:
    """Rows that look different may hold the same records: one more of them, or another order."""
    model = make_mlp()
    first = start(model)
    run(first, mlp_case())
    first.close()
    inputs, labels = vectors().tensors
    other = torch.utils.data.TensorDataset(inputs + 1.0, labels)
    second = start(model)
    run(second, Case(make=make_mlp, data=other, loss=classify))
    assert epsilon(second) == together(2)


def test_weights_of_a_run_without_noise_are_not_certified_later() -> None:
    case, model = mlp_case(), make_mlp()
    plain = start(model, noise_multiplier=0.0)
    run(plain, case)
    plain.close()
    private = start(model)
    run(private, case)
    assert private.card().certified is None
    assert "an earlier run on these weights had no claim" in str(private.card())


def test_weights_of_unaccounted_batches_are_not_certified_later() -> None:
    model, data = make_mlp(), vectors()
    unaccounted = start(model, sampling="unaccounted")
    with unaccounted:
        batch = Batch(tensor[:4] for tensor in data.tensors)
        unaccounted.backward(classify(model, batch))
        unaccounted.step()
    unaccounted.close()
    private = start(model)
    run(private, mlp_case())
    assert private.card().certified is None


def test_the_same_seed_twice_on_one_model_is_refused() -> None:
    case, model = mlp_case(), make_mlp()
    first = start(model, seed=3)
    run(first, case, num_steps=1)
    first.close()
    with pytest.raises(InvalidArgumentError, match="the seed of an earlier run"):
        run(start(model, seed=3), case)
    with pytest.warns(UserWarning, match="is closed"):
        run(start(model, seed=4), case)
    run(start(make_mlp(), seed=3), case)


@pytest.mark.parametrize("durable", [True, False])
def test_going_on_with_a_checkpoint_is_no_second_run(tmp_path: Path, durable: bool) -> None:
    case, model = mlp_case(), make_mlp()
    ledger = {"ledger_path": tmp_path / "ledger.jsonl"} if durable else {}
    first = start(model, **ledger)
    run(first, case, num_steps=2)
    checkpoint = save_checkpoint(first, tmp_path / "checkpoints")
    first.close()
    resumed = start(model, **ledger)
    load_checkpoint(resumed, checkpoint)
    run(resumed, case)
    assert epsilon(resumed) == epsilon(first)
