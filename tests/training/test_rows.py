"""Equal rows are found before the first release, and the card says what they are worth."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import ConcatDataset, Dataset, Subset

from shuffled_dpsgd.training import make_private
from shuffled_dpsgd.training.rows import shared_rows, survey
from training.cases import vectors

RECORDS = 60
NONE = "no row was found twice (all rows compared)"


def rows_of(**fields: Any) -> list[dict[str, Any]]:
    """Each field is a function of the row's number."""
    return [{key: make(number) for key, make in fields.items()} for number in range(RECORDS)]


def unit_on_the_card(data: Any) -> str:
    model = nn.Sequential(nn.Linear(4, 3))
    private = make_private(
        model, torch.optim.SGD(model.parameters(), lr=0.1), dataset_size=len(data), delta=1e-4,
        expected_batch_size=10, num_steps=2, noise_multiplier=1.0, shuffle="off",
    )  # fmt: skip
    private.batches(data).close()
    unit = private.card().subject["unit"]
    private.close()
    return unit


NUMBERED: dict[str, Any] = {
    "a number": lambda number: number,
    "a number in a tensor": torch.tensor,
    "a word": lambda number: f"row-{number}",
}


@pytest.mark.filterwarnings("ignore:the most frequent row")
@pytest.mark.parametrize("kind", NUMBERED)
@pytest.mark.parametrize("content", [lambda n: torch.full((4,), float(n % 20)), lambda n: [n % 20]])
def test_a_column_that_numbers_the_rows_hides_no_copies(kind: str, content: Any) -> None:
    data = rows_of(x=content, y=lambda number: number % 2, idx=NUMBERED[kind])
    unit = unit_on_the_card(data)
    assert "is there 3 times (all rows compared, without field 'idx')" in unit
    assert "(proven)" in unit


@pytest.mark.parametrize(
    "fields",
    [
        {"name": lambda number: f"name{number}", "y": lambda number: number % 3},
        {"value": lambda number: number, "y": lambda number: number % 3},
        {"text": lambda number: f"text {number}", "y": lambda number: number % 3},
    ],
)
def test_what_differs_in_all_rows_is_compared_where_it_is_all_there_is(fields: Any) -> None:
    assert NONE in unit_on_the_card(rows_of(**fields))


def test_rows_are_shared_whatever_number_they_have() -> None:
    data = rows_of(x=lambda n: torch.full((4,), float(n)), y=lambda n: n % 2, idx=lambda n: n)
    heldout = [row | {"idx": number} for number, row in enumerate(data[50:])]
    assert shared_rows(data, heldout) == 10
    assert shared_rows(data[:50], heldout) == 0


def test_copies_without_end_have_an_epsilon() -> None:
    data = Subset(vectors(count=RECORDS), [0] * 1100)
    with pytest.warns(UserWarning, match=r"there 1100 times .* and worse: this is for 1,024"):
        unit = unit_on_the_card(data)
    assert "ε = " in unit
    data = ConcatDataset([vectors(count=RECORDS)] * 40)
    with pytest.warns(UserWarning, match=r"there 40 times .*: ε = .* \(proven\) .* 40 rows\."):
        unit_on_the_card(data)


class Drawn(Dataset[Any]):
    """Twenty records, each three times, seen anew at every load."""

    def __init__(self, generator: Any) -> None:
        self.generator = generator

    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, index: int) -> Any:
        return torch.full((4,), index % 20 + 0.1 * self.generator.random()), index % 2


def test_rows_under_random_numbers_are_compared_under_the_same_or_not_at_all() -> None:
    assert survey(Drawn(random)).largest == survey(Drawn(random.Random(0))).largest == 3
    assert "nobody looked for equal rows" in unit_on_the_card(Drawn(random.SystemRandom()))


@pytest.mark.parametrize(
    "repeated",
    [lambda data: Subset(data, [*range(50), 7, 7]), lambda data: ConcatDataset([data] * 3)],
)
def test_repeated_indices_are_found_where_content_cannot_be_compared(repeated: Any) -> None:
    data = repeated(Drawn(random.SystemRandom()))
    with pytest.warns(UserWarning, match="there 3 times .its rows differ from one load"):
        assert "3 rows" in unit_on_the_card(data)


def test_data_that_were_edited_are_looked_at_again() -> None:
    data = vectors(count=RECORDS)
    assert NONE in unit_on_the_card(data)
    data.tensors[0][:10], data.tensors[1][:10] = data.tensors[0][0].clone(), 0
    with pytest.warns(UserWarning, match="there 10 times"):
        unit_on_the_card(data)
