"""A check that could not be made is not counted as made, and the card says which."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, Dataset, Subset, default_collate

from shuffled_dpsgd.errors import InvalidArgumentError, UnsupportedModuleError
from training.cases import vectors
from training.test_neighbours import (
    RECORDS,
    WIDTH,
    BrokenOnes,
    Records,
    SecondDrawn,
    mlp,
    run,
    start,
    stops_before_the_first_release,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:the most frequent row"),
    pytest.mark.filterwarnings("ignore:δ = "),
]
ITEM = "not checked: that an item of the data set is made of one record"
ROW = "not checked: that a row of a batch is made of one record"


class Wrapped(Dataset[Any]):
    """A data set around another, as transforms are."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> Any:
        x, y = self.inner[index]
        return x / 2, y


BACKWARDS = list(range(RECORDS - 1, -1, -1))


def halves(data: Any) -> list[Any]:
    return [Subset(data, range(0, RECORDS, 2)), Subset(data, range(1, RECORDS, 2))]


AROUND = {
    "a subset": lambda data: Subset(data, BACKWARDS),
    "several parts": lambda data: ConcatDataset(halves(data)),
    "a wrapper": Wrapped,
    "a wrapper of a subset": lambda data: Wrapped(Subset(data, BACKWARDS)),
    "a subset of a wrapper": lambda data: Subset(Wrapped(data), BACKWARDS),
}


@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND.keys())
@pytest.mark.parametrize("kind", [BrokenOnes, SecondDrawn])
def test_what_a_data_set_is_wrapped_in_hides_nothing(around: Any, kind: Any) -> None:
    stops_before_the_first_release(start(mlp()), around(kind()))


@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND.keys())
def test_wrapped_data_sets_that_are_healthy_pass_and_nothing_is_listed(around: Any) -> None:
    private = start(mlp(), check_rate=1.0, num_steps=2)
    run(private, around(Records()))
    assert private.ledger.spent == 2
    assert ITEM not in str(private.card())


class OnDisk(Dataset[Any]):
    """Its records lie where nobody can exchange them."""

    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, index: int) -> Any:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(WIDTH, generator=generator), index % 3


def test_a_data_set_whose_records_cannot_be_exchanged_is_listed() -> None:
    private = start(mlp(), num_steps=1)
    run(private, OnDisk())
    assert ITEM in str(private.card())


@pytest.mark.parametrize("make", [lambda data: data, list])
def test_lists_and_tensors_are_not_listed(make: Any) -> None:
    private = start(mlp(), num_steps=1)
    run(private, make(vectors(count=RECORDS)))
    assert ITEM not in str(private.card())


def test_a_table_of_hugging_face_is_not_listed() -> None:
    datasets = pytest.importorskip("datasets")
    x, y = vectors(count=RECORDS).tensors
    table = datasets.Dataset.from_dict({"x": x.tolist(), "y": y.tolist()}).with_format("torch")

    def collate(rows: list[Any]) -> Any:
        return torch.stack([row["x"] for row in rows]), torch.stack([row["y"] for row in rows])

    private = start(mlp(), num_steps=1)
    run(private, table, collate=collate)
    assert ITEM not in str(private.card())


def test_a_table_whose_transform_looks_elsewhere_is_stopped() -> None:
    datasets = pytest.importorskip("datasets")
    x, y = vectors(count=RECORDS).tensors
    table = datasets.Dataset.from_dict({"x": x.tolist(), "y": y.tolist()})

    def centred(rows: Any) -> Any:
        found = torch.tensor(rows["x"])
        return {"x": found - found.mean(0), "y": torch.tensor(rows["y"])}

    def collate(rows: list[Any]) -> Any:
        return torch.stack([row["x"] for row in rows]), torch.stack([row["y"] for row in rows])

    stops_before_the_first_release(start(mlp()), table.with_transform(centred), collate=collate)


# --- collate functions that can hardly be compared ------------------------------------------------


class Fussy:
    """Takes only the batch that it has seen first."""

    def __init__(self) -> None:
        self.known: set[float] = set()

    def __call__(self, samples: list[Any]) -> Any:
        x, y = default_collate(samples)
        found = {float(each) for each in x[:, 0]}
        if self.known and found != self.known:
            raise ValueError("records that do not belong together")
        self.known = found
        return x, y


def test_where_no_exchange_could_be_made_the_card_says_so() -> None:
    private = start(mlp(), num_steps=1, physical_batch_size=100)
    run(private, vectors(count=RECORDS), collate=Fussy())
    assert ROW in str(private.card())


class RaggedWords(Dataset[Any]):
    def __init__(self) -> None:
        draws = random.Random(0)
        lengths = [draws.randrange(3, 12) for _ in range(RECORDS)]
        self.words = [[draws.randrange(1, 20) for _ in range(n)] for n in lengths]

    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, index: int) -> Any:
        return self.words[index], index % 3


def masked_and_mixed(samples: list[Any]) -> Any:
    """One mask for the whole batch, whose shape the longest record decides; and labels moved."""
    rows = [torch.tensor(words, dtype=torch.float) for words, _ in samples]
    x = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    x = x.masked_fill(torch.bernoulli(torch.full(x.shape, 0.3)).bool(), 0.0)
    return F.pad(x, (0, 12 - x.shape[1])), torch.tensor([y for _, y in samples]).roll(1)


def test_mixing_beside_masks_of_changing_shape_is_stopped() -> None:
    for seed in range(3):
        stops_before_the_first_release(
            start(nn.Linear(12, 3), seed=seed), RaggedWords(), collate=masked_and_mixed
        )


# --- losses ---------------------------------------------------------------------------------------


def test_a_free_tensor_in_a_mean_is_refused() -> None:
    free = torch.ones((), requires_grad=True)
    private = start(mlp(), loss_reduction="mean")
    with pytest.raises(UnsupportedModuleError, match="requires gradients"):
        run(private, vectors(count=RECORDS), lambda z, y: F.cross_entropy(z * free, y))
    assert private.ledger.spent == 0


def test_a_free_tensor_in_a_loss_that_is_handed_over_is_refused() -> None:
    free = torch.ones((), requires_grad=True)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch.x) * free, batch.y)

    private = start(mlp(), loss_reduction="mean", loss=loss)
    with pytest.raises(UnsupportedModuleError, match="requires gradients"):
        run(private, vectors(count=RECORDS), lambda z, y: F.cross_entropy(z, y))
    assert private.ledger.spent == 0


class Bag(nn.Module):
    """The mean of the words' vectors; `masks` says whether padding is left out."""

    def __init__(self, masks: bool) -> None:
        super().__init__()
        self.words, self.head, self.masks = nn.Embedding(20, 8), nn.Linear(8, 3), masks

    def forward(self, ids: Tensor) -> Tensor:
        h = self.words(ids)
        counts = (ids > 0).float() if self.masks else torch.ones_like(ids, dtype=torch.float)
        return self.head((h * counts[..., None]).sum(1) / counts.sum(1, keepdim=True))


def padded(samples: list[Any]) -> Any:
    rows = [torch.tensor(words) for words, _ in samples]
    labels = torch.tensor([label for _, label in samples])
    return nn.utils.rnn.pad_sequence(rows, batch_first=True), labels


@pytest.mark.parametrize("masks", [True, False])
def test_padding_that_is_not_masked_is_found_in_ones_own_loop(masks: bool) -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch.x), batch.y, reduction="none")

    model = Bag(masks)
    private = start(model, loss=loss)
    if masks:
        run(private, RaggedWords(), collate=padded)
        assert private.ledger.spent == 4
        return
    with pytest.raises(InvalidArgumentError, match="mask padding"):
        run(private, RaggedWords(), collate=padded)
    assert private.ledger.spent == 0


# --- models that take padding out -----------------------------------------------------------------


class Unpadded(nn.Module):
    """Computes with the tokens of all samples one behind the other.

    With `moves`, they go back to samples by the lengths of their neighbours: as many in all.
    """

    def __init__(self, moves: bool) -> None:
        super().__init__()
        self.words, self.body = nn.Embedding(20, 8), nn.Linear(8, 8)
        self.head, self.moves = nn.Linear(8, 3), moves

    def forward(self, ids: Tensor) -> Tensor:
        lengths = (ids > 0).sum(1)
        h = torch.tanh(self.body(self.words(ids[ids > 0])))
        lengths = lengths.roll(1) if self.moves else lengths
        return self.head(torch.stack([part.mean(0) for part in h.split(lengths.tolist())]))


@pytest.mark.parametrize("even_first", [True, False])
@pytest.mark.parametrize("moves", [True, False])
def test_unpadding_with_other_lengths_is_exact_or_stopped(even_first: bool, moves: bool) -> None:
    """Batches with as many tokens in all, in samples of equal and of other lengths."""
    data = RaggedWords()
    even = [[1 + (n + k) % 19 for k in range(6)] for n in range(RECORDS)]
    uneven = [[1 + (n + k) % 19 for k in range(4 if n % 2 else 8)] for n in range(RECORDS)]
    data.words = even if even_first else uneven
    private = start(Unpadded(moves), num_steps=8)
    refusals = []
    try:
        for step, (ids, y) in enumerate(private.batches(data, collate=padded)):
            if step == 1:
                data.words = uneven
            private.backward(F.cross_entropy(private.model(ids), y, reduction="none"))
            private.step()
    except (InvalidArgumentError, UnsupportedModuleError) as error:
        refusals.append(str(error))
    # Samples of equal lengths stay where they are, whichever lengths they are given.
    assert private.ledger.spent <= (1 if even_first else 0) or not moves
    assert refusals or private.ledger.spent == 8
