"""A label that is no class of the loss is named before anything is spent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.training import LoopSettings, make_private, rows, train
from training.cases import FixedSampler

RECORDS, WIDTH, CLASSES = 60, 4, 3

pytestmark = [
    pytest.mark.filterwarnings("ignore:field"),
    pytest.mark.filterwarnings("ignore:δ = "),
]


def data(bad: int = 7, at: int = 50) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(CLASSES, (RECORDS,), generator=generator)
    y[at] = bad
    return TensorDataset(torch.randn(RECORDS, WIDTH, generator=generator), y)


def start(**changes: Any) -> Any:
    model = nn.Sequential(nn.Linear(WIDTH, 6), nn.Tanh(), nn.Linear(6, CLASSES))
    settings: dict[str, Any] = {
        "dataset_size": RECORDS,
        "expected_batch_size": 6,
        "num_steps": 4,
        "noise_multiplier": 1.0,
        "delta": 1e-3,
        "shuffle": "off",
        "seed": 1,
    }
    private = make_private(
        model, torch.optim.SGD(model.parameters(), lr=0.1), **(settings | changes)
    )
    # The row with the bad label comes in the third step.
    private.sampler = FixedSampler([1, 2, 3], [4, 5], [50, 51], [6, 7], dataset_size=RECORDS)
    return private


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch.x), batch.y, reduction="none")


def log_softmax_first(model: nn.Module, batch: Any) -> Tensor:
    return F.nll_loss(F.log_softmax(model(batch.x), 1), batch.y, reduction="none")


def run(private: Any, records: Any, loss: Callable[[nn.Module, Any], Tensor]) -> None:
    for batch in private.batches(records):
        private.backward(loss(private.model, batch))
        private.step()


@pytest.mark.parametrize("loss", [cross_entropy, log_softmax_first])
@pytest.mark.parametrize("bad", [7, 3, -1])
def test_a_label_of_a_later_batch_is_named_before_the_first_release(loss: Any, bad: int) -> None:
    private = start()
    with pytest.raises(
        InvalidArgumentError, match=f"labels: expected classes from 0 to 2.*{bad}, in row 50"
    ):
        run(private, data(bad), loss)
    assert private.ledger.spent == 0


def test_a_label_of_the_first_batch_is_named_where_the_loss_is_known() -> None:
    private = start(loss=cross_entropy)
    with pytest.raises(InvalidArgumentError, match="labels"):
        run(private, data(at=1), cross_entropy)
    private = start()
    with pytest.raises(InvalidArgumentError, match="labels"):
        train(private, data(at=1), cross_entropy, settings=LoopSettings(price_steps=False))
    assert private.ledger.spent == 0


@pytest.mark.filterwarnings("default:field")
def test_without_the_loss_a_warning_comes_first() -> None:
    private = start()
    with pytest.warns(UserWarning, match="field 1 reaches 7, in row 1"), pytest.raises(IndexError):
        run(private, data(at=1), cross_entropy)
    assert private.ledger.spent == 0


def test_rows_that_were_not_looked_at_are_when_they_come(monkeypatch: Any) -> None:
    monkeypatch.setattr(rows, "_SECONDS", -1.0)
    monkeypatch.setattr(rows, "_AT_ONCE", 8)
    private = start()
    with pytest.raises(InvalidArgumentError, match="batch that comes next"):
        run(private, data(), cross_entropy)
    assert private.ledger.spent == 2


def test_labels_that_the_loss_ignores_pass_and_so_do_other_whole_numbers() -> None:
    private = start()
    run(private, data(-100), cross_entropy)
    assert private.ledger.spent == 4

    def squared(model: nn.Module, batch: Any) -> Tensor:
        return (model(batch.x).sum(1) - batch.y).square()

    private = start()
    run(private, data(1000), squared)
    assert private.ledger.spent == 4
