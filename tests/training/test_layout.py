"""Physical batches: every drawn record once, little padding, few shapes."""

from __future__ import annotations

import random
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shuffled_dpsgd.training.layout import Layout, cheapest_cuts, length_class, lengths_of

LENGTHS = [random.Random(i).choice([4, 7, 9, 12, 20, 40, 66]) for i in range(2000)]


def draw(seed: int, expected: int) -> list[int]:
    chance = random.Random(seed)
    return [i for i in range(len(LENGTHS)) if chance.random() < expected / len(LENGTHS)]


@given(
    drawn=st.lists(st.integers(0, len(LENGTHS) - 1), unique=True, max_size=120),
    batch_size=st.integers(1, 50),
    pads=st.booleans(),
    knows=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_every_record_counts_once_and_nothing_is_too_large(
    drawn: list[int], batch_size: int, pads: bool, knows: bool
) -> None:
    lengths = LENGTHS if knows else None
    layout = Layout(batch_size=batch_size, expected=40, lengths=lengths, pads=pads)
    parts = layout.parts(drawn)
    counted = [record for part in parts for record in part.records[: part.counted]]
    assert sorted(counted) == sorted(drawn)
    for part in parts:
        assert 0 < part.counted <= len(part.records) <= batch_size
        assert set(part.records[part.counted :]) <= set(part.records[: part.counted])
        if part.length is not None:
            assert max(LENGTHS[record] for record in part.records) <= part.length
        if not pads:
            assert part.counted == len(part.records)


def test_without_lengths_or_padding_nothing_moves() -> None:
    layout = Layout(batch_size=3, expected=5)
    assert [part.records for part in layout.parts([9, 1, 7, 2])] == [(9, 1, 7), (2,)]
    assert layout.parts([]) == []


def test_the_same_draw_has_the_same_parts_in_any_order() -> None:
    layout = Layout(batch_size=16, expected=60, lengths=LENGTHS, pads=True)
    drawn = draw(0, 60)
    assert layout.parts(drawn) == layout.parts(drawn[::-1])


@pytest.mark.parametrize("batch_size", [32, 300])
def test_few_shapes_come_again_and_little_is_padding(batch_size: int) -> None:
    layout = Layout(batch_size=batch_size, expected=300, lengths=LENGTHS, pads=True, max_length=512)
    shapes: set[tuple[int, int | None]] = set()
    tokens = padded = naive = 0
    for seed in range(100):
        drawn = draw(seed, 300)
        for part in layout.parts(drawn):
            shapes.add((len(part.records), part.length))
            assert part.length is not None
            assert part.length % 8 == 0
            padded += len(part.records) * part.length
        tokens += sum(LENGTHS[i] for i in drawn)
        naive += len(drawn) * max(LENGTHS)
    assert len(shapes) <= 24
    assert tokens / padded > 1.5 * tokens / naive


def test_a_gpu_is_given_fewer_batches_than_a_cpu() -> None:
    drawn = draw(1, 300)
    counts = {
        device: len(
            Layout(batch_size=300, expected=300, lengths=LENGTHS, device=device).parts(drawn)
        )
        for device in ("cpu", "cuda")
    }
    assert counts["cuda"] < counts["cpu"]


def test_nothing_is_padded_beyond_the_positions_of_a_model() -> None:
    lengths = [3, 5, 11]
    for most, expected in ((None, 11), (12, 11), (16, 16), (512, 16)):
        layout = Layout(
            batch_size=4, expected=2, lengths=lengths, pads=True, device="cuda", max_length=most
        )
        assert layout.shapes[-1].length == expected


def test_cuts_are_the_cheapest_of_all() -> None:
    def cost(count: float, length: int, is_last: bool) -> float:
        return 100 + count * length + 7 * is_last

    def price(cuts: list[tuple[int, int]]) -> float:
        return sum(cost(sum(counts[a:b]), lengths[b - 1], b == len(lengths)) for a, b in cuts)

    lengths, counts = [8, 16, 24, 48, 64], [5.0, 30.0, 1.0, 12.0, 2.0]
    every = []
    for mask in range(16):
        ends = [i + 1 for i in range(4) if mask >> i & 1] + [5]
        every.append(list(zip([0, *ends[:-1]], ends, strict=True)))
    assert price(cheapest_cuts(lengths, counts, cost)) == min(map(price, every))


def test_lengths_are_asked_of_whoever_can_say_them() -> None:
    class Knowing:
        def __len__(self) -> int:
            return 2

        def length(self, index: int) -> int:
            return index + 3

    assert lengths_of(Knowing()) == [3, 4]
    assert lengths_of([{"input_ids": [1, 2]}, {"input_ids": [1]}]) == [2, 1]
    assert lengths_of([{"input_ids": [1, 2]}, {"input_ids": [1, 3]}]) is None
    assert lengths_of([([1, 2], 0), ([1], 1)]) is None
    assert lengths_of(list(range(4))) is None


def test_a_column_of_a_hugging_face_data_set_says_them() -> None:
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_dict({"input_ids": [[1], [1, 2]]})
    assert lengths_of(data) == [1, 2]
    assert lengths_of(data.select([1, 0, 1]).with_format("torch")) == [2, 1, 2]
    decoding = AssertionError("a million records would take seconds")
    with mock.patch("datasets.arrow_dataset.Column.__iter__", side_effect=decoding):
        assert lengths_of(data) == [1, 2]
    data.set_transform(lambda rows: rows)
    assert lengths_of(data) is None


def test_classes_never_cut_and_grow_with_length() -> None:
    found = [length_class(n) for n in range(1, 600)]
    assert all(c >= n for n, c in enumerate(found, start=1))
    assert found == sorted(found)
    assert len(set(found)) < 30
