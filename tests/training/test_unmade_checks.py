"""A check that could not be made is not counted as made, and the card says which."""

from __future__ import annotations

import random
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, Dataset, Subset, default_collate

from shuffled_dpsgd.auditing.input_canaries import Extended
from shuffled_dpsgd.clipping.checks.check_turns import CheckTurns
from shuffled_dpsgd.errors import InvalidArgumentError, UnsupportedModuleError
from shuffled_dpsgd.training.loss_check import LossExchange
from shuffled_dpsgd.training.record_check import check_records_alone
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


@pytest.mark.parametrize("kind", [Records, BrokenOnes])
def test_a_subset_may_lie_in_a_longer_data_set(kind: Any) -> None:
    data = kind()
    few = Subset(data, BACKWARDS[10:])
    whole = Extended(few, [data[number] for number in BACKWARDS[:10]])
    if kind is BrokenOnes:
        stops_before_the_first_release(start(mlp()), whole)
    else:
        run(start(mlp(), check_rate=1.0, num_steps=2), whole)


class CentredByAll(Records):
    def __getitem__(self, index: int) -> Any:
        return self.x[index] - self.x.mean(0), self.y[index]


class NextOne(Records):
    def __getitem__(self, index: int) -> Any:
        return 0.8 * self.x[index] + 0.2 * self.x[(index + 1) % RECORDS], self.y[index]


class Nearest(Records):
    def __getitem__(self, index: int) -> Any:
        apart = (self.x - self.x[index]).norm(dim=1)
        return self.x[apart.topk(2, largest=False).indices].mean(0), self.y[index]


class AnotherIfLarge(Records):
    """One in a hundred."""

    def __getitem__(self, index: int) -> Any:
        at = (index + 1) % RECORDS if float(self.x[index, 0]) > 1.9 else index
        return self.x[at], self.y[at]


class NextForBroken(Records):
    """One of them all is broken, and the next stands for it."""

    def __init__(self) -> None:
        super().__init__()
        self.x[17] = torch.nan

    def __getitem__(self, index: int) -> Any:
        at = index + 1 if bool(self.x[index].isnan().any()) else index
        return self.x[at], self.y[at]


class SeldomASecond(Records):
    """One load in ten, of records in an order of their own: most loads show nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.order = random.Random(0).sample(range(RECORDS), RECORDS)

    def __getitem__(self, index: int) -> Any:
        at = self.order[index]
        second = random.randrange(RECORDS) if random.random() < 0.1 else at
        return self.x[at] + self.x[second], self.y[at]


class OfAFrame(Records):
    def __init__(self) -> None:
        super().__init__()
        self.frame = pytest.importorskip("pandas").DataFrame(self.x.numpy())

    def __getitem__(self, index: int) -> Any:
        rows = self.frame.iloc[[index, random.randrange(RECORDS)]]
        return torch.tensor(rows.mean().tolist()), self.y[index]


class ByName(Records):
    def __init__(self) -> None:
        super().__init__()
        self.rows = dict(zip(self.names, self.x, strict=True))

    def __getitem__(self, index: int) -> Any:
        mean = self.rows[self.names[index]] + self.rows[random.choice(self.names)]
        return mean / 2, self.y[index]


def mixed_by_a_transform() -> Any:
    """The transform holds the records it mixes with."""
    data = Records()
    return Transformed(data, lambda x: (x + data.x[random.randrange(RECORDS)]) / 2)


class Transformed(Wrapped):
    def __init__(self, inner: Any, transform: Any) -> None:
        super().__init__(inner)
        self.transform = transform

    def __getitem__(self, index: int) -> Any:
        x, y = self.inner[index]
        return self.transform(x), y


MIXED: list[Any] = [OfAFrame, ByName, CentredByAll, NextOne, Nearest, AnotherIfLarge, SeldomASecond]


@pytest.mark.parametrize("make", [*MIXED, mixed_by_a_transform])
def test_items_made_of_several_records_are_found_however_they_are_made(make: Any) -> None:
    stops_before_the_first_release(start(mlp()), make())


def test_one_broken_item_of_all_is_found_under_any_random_numbers() -> None:
    data = NextForBroken()
    for seed in range(30):
        with pytest.raises(InvalidArgumentError, match="an item 17 that changes"):
            check_records_alone(data, [3, 60], random.Random(seed), [], thorough=True)


class Plain(list[Any]):
    """A list with a method of its own."""

    def length(self, index: int) -> int:
        return len(self[index])


class Mixing(list[Any]):
    def __getitem__(self, index: Any) -> Any:
        return (super().__getitem__(index) + super().__getitem__(random.randrange(len(self)))) / 2


class InBulk(list[Any]):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [sum(self) / len(self) for _ in indices]


def test_an_item_of_a_list_is_its_place_if_the_list_loads_as_lists_do() -> None:
    rows = [torch.full((3,), float(row)) for row in range(40)]
    draws = random.Random(0)
    assert check_records_alone(Plain(rows), [3, 5], draws, [], thorough=True) == ""
    for other in (Mixing(rows), InBulk(rows)):
        assert "holds no list" in check_records_alone(other, [3, 5], draws, [], thorough=True)


def test_a_transform_inside_a_subset_is_looked_into() -> None:
    data = AROUND["a subset"](mixed_by_a_transform())
    stops_before_the_first_release(start(mlp()), data)


class Offsets(Records):
    """Records of several lengths, one behind the other: no list has an entry for each."""

    def __init__(self) -> None:
        super().__init__()
        self.begins = list(range(0, RECORDS * WIDTH, WIDTH))
        self.buffer = self.x.flatten()

    def __getitem__(self, index: int) -> Any:
        end = self.begins[index + 1] if index + 1 < RECORDS else len(self.buffer)
        return self.buffer[self.begins[index] : end], self.y[index]


class InTwoOrders(Records):
    """Inputs and labels lie in two orders, and some inputs serve two items."""

    def __init__(self) -> None:
        super().__init__()
        draws = random.Random(0)
        self.order = torch.tensor(draws.sample(range(RECORDS), RECORDS))
        # None stands at its own place, which another item could then share.
        self.others = [(n + draws.randrange(1, RECORDS)) % RECORDS for n in range(RECORDS)]

    def __getitem__(self, index: int) -> Any:
        return self.x[self.others[index]], self.y[self.order[index]]


class Remembered(Records):
    def __init__(self) -> None:
        super().__init__()
        self.known: dict[int, Any] = {}

    def __getitem__(self, index: int) -> Any:
        return self.known.setdefault(index, super().__getitem__(index))


class CentredBefore(Records):
    def __init__(self) -> None:
        super().__init__()
        self.mean = self.x.mean(0)

    def __getitem__(self, index: int) -> Any:
        return self.x[index] - self.mean, self.y[index]


HEALTHY: list[Any] = [InTwoOrders, Remembered, CentredBefore]


@pytest.mark.parametrize("make", HEALTHY)
@pytest.mark.parametrize("around", ["a wrapper", "several parts"])
def test_items_of_one_record_pass_wherever_it_lies(make: Any, around: str) -> None:
    private = start(mlp(), num_steps=1)
    run(private, AROUND[around](make()))
    assert ITEM not in str(private.card())


class Numbered(Records):
    """An item has its number as well."""

    def __getitem__(self, index: int) -> Any:
        return self.x[index], self.y[index], index


def test_the_number_of_an_item_is_no_record() -> None:
    private = start(mlp(), num_steps=1)
    run(private, Numbered(), collate=lambda rows: default_collate([row[:2] for row in rows]))
    assert ITEM not in str(private.card())


class OnDisk(Dataset[Any]):
    """Its records lie where nobody can exchange them."""

    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, index: int) -> Any:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(WIDTH, generator=generator), index % 3


class Labelled(OnDisk):
    """Mixes inputs from a disk; its labels are in a list."""

    def __init__(self) -> None:
        self.labels = [number % 3 for number in range(RECORDS)]

    def __getitem__(self, index: int) -> Any:
        other = super().__getitem__(random.randrange(RECORDS))[0]
        return 0.6 * super().__getitem__(index)[0] + 0.4 * other, self.labels[index]


class Partly(Records):
    """Half of an input is from elsewhere: that of the record before."""

    def __getitem__(self, index: int) -> Any:
        return self.x[index] + OnDisk.__getitem__(self, index - 1)[0], self.y[index]


class InACache(Records):
    """What it has loaded once hides where that came from."""

    def __init__(self) -> None:
        super().__init__()
        self.known = {None: None} | {number: self._mixed(number) for number in range(RECORDS)}

    def _mixed(self, index: int) -> Any:
        return self.x[index] + self.x[index - 1], self.y[index]

    def __getitem__(self, index: int) -> Any:
        return self.known[index]


@pytest.mark.parametrize("make", [OnDisk, Labelled, Partly, InACache, Offsets])
@pytest.mark.parametrize("around", ["a wrapper", "several parts"])
def test_items_that_come_from_elsewhere_are_listed(make: Any, around: str) -> None:
    private = start(mlp(), num_steps=1)
    run(private, AROUND[around](make()))
    assert ITEM in str(private.card())


class LoadedAnew(Records):
    def __getitem__(self, index: int) -> Any:
        x, y = self.inputs(index), self.y[index]
        return x + random.SystemRandom().random(), y

    def inputs(self, index: int) -> Tensor:
        return self.x[index]


def test_items_that_cannot_be_repeated_are_listed() -> None:
    private = start(mlp(), num_steps=1)
    run(private, LoadedAnew())
    assert f"{ITEM} (the same item, loaded twice" in str(private.card())


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
        self.known: list[float] = []

    def __call__(self, samples: list[Any]) -> Any:
        x, y = default_collate(samples)
        found = sorted(x[:, 0].tolist())
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
        run(private, vectors(count=RECORDS), lambda z, y: F.cross_entropy(z * free, y))
    assert private.ledger.spent == 0


class Bag(nn.Module):
    """The mean of the words' vectors; `masks` says whether padding is left out."""

    def __init__(self, masks: bool, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.words, self.head, self.masks = nn.Embedding(20, 8), nn.Linear(8, 3), masks

    def forward(self, ids: Tensor) -> Tensor:
        h = self.words(ids)
        counts = (ids > 0).float() if self.masks else torch.ones_like(ids, dtype=torch.float)
        mean = (h * counts[..., None]).sum(1) / counts.sum(1, keepdim=True)
        return self.scale * self.head(mean)


def padded(samples: list[Any]) -> Any:
    rows = [torch.tensor(words) for words, _ in samples]
    labels = torch.tensor([label for _, label in samples])
    return nn.utils.rnn.pad_sequence(rows, batch_first=True), labels


# With a small scale, losses hardly change, as those of a model at its start; gradients do.
@pytest.mark.parametrize("scale", [1.0, 1e-3])
@pytest.mark.parametrize("masks", [True, False])
def test_padding_that_is_not_masked_is_found_in_ones_own_loop(masks: bool, scale: float) -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch.x), batch.y, reduction="none")

    model = Bag(masks, scale)
    private = start(model, loss=loss)
    if masks:
        run(private, RaggedWords(), collate=padded)
        assert private.ledger.spent == 4
        return
    with pytest.raises(InvalidArgumentError, match="mask padding"):
        run(private, RaggedWords(), collate=padded)
    assert private.ledger.spent == 0


def plain(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch.x), batch.y, reduction="none")


@pytest.mark.parametrize("lengths", [(4, 7, 7, 7), (8, 8, 6, 6), (3, 4, 5, 6)])
def test_padding_is_found_whatever_the_lengths_are(lengths: tuple[int, ...]) -> None:
    samples = [(list(range(1, length + 1)), length % 3) for length in lengths]
    for seed in range(20):
        turns = CheckTurns(1.0, seed=seed)
        exchange = LossExchange(Bag(False, 1.0), plain, nullcontext, turns=turns)
        with pytest.raises(InvalidArgumentError, match="mask padding"):
            exchange.check_padding(samples, padded)


def test_a_loss_that_is_not_the_one_handed_over_is_refused() -> None:
    """Another function, or the same on batches that the loop has mixed."""

    def mixed(model: nn.Module, batch: Any) -> Tensor:
        logits = model(0.7 * batch.x + 0.3 * batch.x.flip(0))
        return F.cross_entropy(logits, batch.y, reduction="none")

    for trained in (mixed, lambda model, batch: plain(model, batch).sqrt(), plain):
        private = start(mlp(), loss=plain, num_steps=1)
        is_other = trained is not plain
        with pytest.raises(InvalidArgumentError, match=r"^loss: ") if is_other else nullcontext():
            for batch in private.batches(vectors(count=RECORDS)):
                private.backward(trained(private.model, batch))
                private.step()
        assert private.ledger.spent == 1 - is_other
        private.close()


# --- what happens to large batches alone ----------------------------------------------------------


def above(rows: int, x: Tensor) -> Tensor:
    return x - x.mean(0) if len(x) > rows else x


def collated_above(samples: list[Any]) -> Any:
    x, y = default_collate(samples)
    return above(34, x), y


class Above(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(above(34, x))


@pytest.mark.parametrize(
    ("make", "options"),
    [(Above, {}), (Above, {"loss": plain}), (mlp, {"collate": collated_above})],
)
def test_what_only_happens_to_batches_larger_than_the_first_is_found(
    make: Any, options: dict[str, Any]
) -> None:
    """Twenty rows are drawn on average, and forty are possible."""
    loading = {key: options[key] for key in options.keys() & {"collate"}}
    private = start(
        make(), physical_batch_size=64, **{k: options[k] for k in options if k == "loss"}
    )
    stops_before_the_first_release(private, vectors(count=RECORDS), **loading)


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


def test_a_collate_that_takes_no_record_twice_is_not_checked_on_larger_batches() -> None:
    def distinct(samples: list[Any]) -> Any:
        rows = [tuple(x.tolist()) for x, _ in samples]
        if len({*rows}) < len(rows):
            raise ValueError("the same record twice")
        return default_collate(samples)

    private = start(mlp(), num_steps=1, physical_batch_size=100)
    run(private, vectors(count=RECORDS), collate=distinct)
    assert ROW in str(private.card())
    private = start(mlp(), num_steps=1, physical_batch_size=100)
    run(private, vectors(count=RECORDS))
    assert ROW not in str(private.card())
