"""A label that is no class of the loss is named before anything is spent."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.training import LoopSettings, make_private, rows, train
from shuffled_dpsgd.training.label_check import LabelCheck
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


def start(model: nn.Module | None = None, **changes: Any) -> Any:
    model = model or nn.Sequential(nn.Linear(WIDTH, 6), nn.Tanh(), nn.Linear(6, CLASSES))
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
        InvalidArgumentError, match=f"labels: expected whole numbers from 0 to 2.*{bad}, in row 50"
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
    with pytest.raises(InvalidArgumentError, match="7, in row 50"):
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


class Words(nn.Module):
    """Says the next word, or the class of each."""

    def __init__(self, words: int = 12) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(words, 6), nn.Linear(6, 12)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.words(ids))


def texts(key: str, bad: int, at: int = 50) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(12, (2, RECORDS, 5), generator=generator)
    ids[1, :, 3] = -100
    data = [{"ids": one, "labels": other} for one, other in zip(*ids, strict=True)]
    data[at][key][2] = bad
    return data


def of_each(model: nn.Module, batch: Any) -> Tensor:
    logits, labels = model(batch["ids"]).flatten(0, 1), batch["labels"]
    return F.cross_entropy(logits, labels.flatten(), reduction="none").view_as(labels).mean(1)


def of_the_next(model: nn.Module, batch: Any) -> Tensor:
    logits, labels = model(batch["ids"])[:, :-1].transpose(1, 2), batch["labels"][:, 1:]
    return F.cross_entropy(logits, labels, reduction="none").mean(1)


def of_padded(model: nn.Module, batch: Any) -> Tensor:
    return of_each(model, {**batch, "labels": F.pad(batch["labels"][:, 1:], (0, 1), value=-100)})


@pytest.mark.parametrize("loss", [of_each, of_the_next, of_padded])
@pytest.mark.parametrize(("key", "named"), [("ids", "words"), ("labels", "labels")])
@pytest.mark.parametrize("bad", [99, -1])
def test_a_word_that_the_model_does_not_know_is_named(
    loss: Any, key: str, named: str, bad: int, monkeypatch: Any
) -> None:
    expected = rf"{named}: expected whole numbers from 0 to 11, got {bad}, in row 50"
    for seconds, spent in ((3.0, 0), (-1.0, 2)):
        if (key, bad, seconds) == ("labels", -1, 3.0):
            continue  # Lies between the least and the largest label, so its batch has to come.
        monkeypatch.setattr(rows, "_SECONDS", seconds)
        private = start(model=Words())
        with pytest.raises(InvalidArgumentError, match=expected):
            run(private, texts(key, bad), loss)
        assert private.ledger.spent == spent


def test_labels_like_the_ids_of_the_first_batches_are_not_taken_for_ids(monkeypatch: Any) -> None:
    for bad, at, is_refused in ((-100, 50, False), (99, 50, True)):
        data = texts("ids", 1)
        data = [{"ids": row["ids"], "labels": row["ids"].clone()} for row in data]
        data[at]["labels"][2] = bad
        private = start(model=Words())
        with pytest.raises(InvalidArgumentError, match="row 50") if is_refused else nullcontext():
            run(private, data, of_the_next)
        assert private.ledger.spent == (0 if is_refused else 4)


class Places(nn.Embedding):
    """As of BART: it counts what it is given."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(torch.arange(ids.shape[1]).expand(ids.shape))


def test_embeddings_that_only_count_what_they_are_given_have_room_for_anything() -> None:
    class Placed(Words):
        def __init__(self) -> None:
            super().__init__()
            self.places = Places(5, 6)

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.words(ids) + self.places(ids))

    private = start(model=Placed())
    run(private, texts("ids", 11), of_each)
    assert private.ledger.spent == 4


def test_ids_inside_a_part_of_a_batch_are_known(monkeypatch: Any) -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return of_each(model, batch.x)

    for seconds, spent in ((3.0, 0), (-1.0, 2)):
        monkeypatch.setattr(rows, "_SECONDS", seconds)
        private = start(model=Words())
        with pytest.raises(InvalidArgumentError, match="99, in row 50"):
            run(private, [(row, 0) for row in texts("ids", 99)], loss)
        assert private.ledger.spent == spent


def test_a_word_of_the_first_batch_is_named_and_no_hook_stays() -> None:
    model = Words()
    private = start(model=model)
    with pytest.raises(InvalidArgumentError, match=r"words: .* got 99, in row 2"):
        run(private, texts("ids", 99, at=2), of_each)
    assert private.ledger.spent == 0
    private.close()
    assert not model.words._forward_pre_hooks
    private = start(model=model)
    run(private, texts("ids", 1), of_each)
    assert private.ledger.spent == 4
    assert not model.words._forward_pre_hooks


def test_a_field_of_zeros_is_not_taken_for_ids_that_the_model_makes_itself() -> None:
    """BERT makes its own token types, all zero, and so may be the first labels or flags."""

    class Typed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.types, self.flags = nn.Embedding(2, 4), nn.Embedding(9, 4)

        def forward(self, flags: Tensor) -> Tensor:
            return self.types(torch.zeros_like(flags)) + self.flags(flags.clone())

    records = [torch.tensor([8 * (row > 30)]) for row in range(40)]
    model, zeros = Typed(), torch.zeros(4, 1, dtype=torch.long)
    check = LabelCheck(model, rows.survey(records))
    check.watch([zeros], [0, 1, 2, 3])
    model(zeros)
    check.stop()
    check.check([zeros + 8], [31, 32, 33, 34])
