"""Noise: the right distribution, per block, in float32 or better, in bounded memory."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats

from core.chacha20 import chacha20_word
from shuffled_dpsgd.core.noise import LANES, GaussianNoise, Place, normal, normals, number
from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.training import make_private
from shuffled_dpsgd.training.device_noise import abutting, as_flat
from training.cases import (
    RECORDS,
    Case,
    FixedSampler,
    Sentences,
    classify_sentences,
    distance,
    make_bert,
    run,
    weights,
)

KEY = bytes(range(32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_noise_is_gaussian_with_the_std_asked_for(dtype: torch.dtype) -> None:
    sums = {"a": torch.zeros(700, 500, dtype=dtype), "b": torch.zeros(300_001, dtype=dtype)}
    GaussianNoise().add_(sums, {"a": 2.0, "b": 0.5}, key=KEY)
    for name, std in {"a": 2.0, "b": 0.5}.items():
        drawn = sums[name].flatten().double().numpy() / std
        assert drawn.std() == pytest.approx(1.0, rel=0.01)
        assert abs(drawn.mean()) < 5 / math.sqrt(drawn.size)
        assert stats.kstest(drawn, "norm").pvalue > 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_coordinate_is_the_definition_s(dtype: torch.dtype) -> None:
    """Single coordinates in plain Python, on both sides of every border there is."""
    whole = normals(KEY, 1, 0, 3 * 2 * LANES + 5, dtype)
    borders = [0, 1, LANES - 1, LANES, 2 * LANES - 1, 2 * LANES, 5 * LANES, whole.numel() - 1]
    for first in borders:
        expected = normal(KEY, Place(1, first), wide=dtype == torch.float64)
        room = 1e-12 if dtype == torch.float64 else 1e-4
        assert float(whole[first]) == pytest.approx(expected, abs=room)


def test_the_words_are_those_of_the_stated_streams() -> None:
    """The transform written out once more, from the key stream's bytes by another ChaCha20."""
    pair = LANES + 7
    a, b, c = (int(chacha20_word(KEY, stream, 3, pair)) for stream in range(3))
    u = ((a & 0x7FFFFFFF) + ((b & 0x7FFFFFFF) + 0.5) / 2**31) / 2**31
    angle = math.pi * (c - (1 << 32) * (c >> 31)) / 2**31
    radius = math.sqrt(-2.0 * math.log(u))
    assert normal(KEY, Place(3, 2 * LANES + 7)) == pytest.approx(radius * math.cos(angle))
    assert normal(KEY, Place(3, 3 * LANES + 7)) == pytest.approx(radius * math.sin(angle))


def test_tails_reach_beyond_eight_standard_deviations() -> None:
    """No word stops a normal short: the smallest u there is gives 9.3."""
    smallest = (0 + 0.5 / 2**31) / 2**31
    assert math.sqrt(-2.0 * math.log(smallest)) > 9.3
    drawn = normals(KEY, 0, 0, 1 << 24).abs()
    for deviations in (4.0, 4.5, 5.0):
        expected = drawn.numel() * 2 * float(stats.norm.sf(deviations))
        found = int((drawn > deviations).sum())
        assert abs(found - expected) < 5 * math.sqrt(expected) + 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_parts_draw_what_the_whole_does(dtype: torch.dtype) -> None:
    """In any order, in one buffer or several, cut anywhere."""
    sizes = {"a": 70_001, "b": 150_000, "c": 60, "d": 600_000}
    stds = {"a": 1.0, "b": 1.0, "c": 2.0, "d": 2.0}
    whole = {name: torch.ones(size, dtype=dtype) for name, size in sizes.items()}
    places = number(whole)
    GaussianNoise().add_(whole, stds, key=KEY, divide_by=8.0)
    for low, high in ((0, 1), (3, 4_000), (4_095, 9_000), (30, 60)):
        parts = {n: torch.ones(max(0, min(high, s) - low), dtype=dtype) for n, s in sizes.items()}
        held = {n: Place(places[n].group, places[n].first + low) for n in sizes}
        shuffled = dict(reversed(parts.items()))
        GaussianNoise().add_(shuffled, stds, key=KEY, places=held, divide_by=8.0)
        for name, part in parts.items():
            assert torch.equal(part, whole[name][low : low + part.numel()])


def test_dtypes_have_streams_of_their_own() -> None:
    mixed = {"a": torch.zeros(50), "b": torch.zeros(50, dtype=torch.float64)}
    assert number(mixed) == {"a": Place(0, 0), "b": Place(1, 0)}
    GaussianNoise().add_(mixed, {"a": 1.0, "b": 1.0}, key=KEY)
    assert abs(float(torch.corrcoef(torch.stack([mixed["a"].double(), mixed["b"]]))[0, 1])) < 0.5


def test_only_neighbours_in_one_storage_are_merged() -> None:
    buffer = torch.arange(24.0)
    first, gap, last = buffer[:6].view(2, 3), buffer[7:12], buffer[12:24].view(3, 4)
    assert [as_flat(run).tolist() for run in abutting([gap, last])] == [list(range(7, 24))]
    assert len(abutting([first, gap])) == 2
    assert len(abutting([last, gap])) == 2
    assert len(abutting([torch.zeros(2), torch.zeros(2)])) == 2
    assert len(abutting([first.t(), buffer[6:12]])) == 2


def test_the_sum_is_divided_even_where_there_is_no_noise() -> None:
    sums = {"a": torch.full((5,), 6.0), "b": torch.full((5,), 6.0), "c": torch.zeros(0)}
    GaussianNoise().add_(sums, {"a": 0.0, "b": 1.0, "c": 1.0}, key=KEY, divide_by=4.0)
    assert torch.equal(sums["a"], torch.full((5,), 1.5))
    alone = {"x": torch.zeros(5), "b": torch.full((5,), 6.0)}
    GaussianNoise().add_(alone, {"x": 0.0, "b": 1.0}, key=KEY)
    assert torch.equal(sums["b"], alone["b"] / 4)


def test_noise_differs_between_keys_and_tensors_and_repeats_with_the_key() -> None:
    def draw(key: bytes) -> dict[str, torch.Tensor]:
        sums = {"a": torch.zeros(1000), "b": torch.zeros(1000)}
        GaussianNoise().add_(sums, {"a": 1.0, "b": 1.0}, key=key)
        return sums

    first, second, again = draw(KEY), draw(bytes(32)), draw(KEY)
    assert torch.equal(first["a"], again["a"])
    for one, other in ((first["a"], second["a"]), (first["a"], first["b"])):
        assert abs(float(torch.corrcoef(torch.stack([one, other]))[0, 1])) < 0.15


def test_noise_is_drawn_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """No second buffer of the size of the tensor."""
    drawn: list[int] = []

    def counted(key: bytes, group: int, first: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        drawn.append(count)
        return normals(key, group, first, count, dtype)

    monkeypatch.setattr("shuffled_dpsgd.core.noise.normals", counted)
    GaussianNoise().add_({"a": torch.zeros(3_000_001)}, {"a": 1.0}, key=KEY)
    assert sum(drawn) == 3_000_001
    assert max(drawn) <= 1 << 19


def test_narrow_sums_and_forgotten_tensors_are_refused() -> None:
    noise = GaussianNoise()
    with pytest.raises(InvalidArgumentError, match="float32 or float64"):
        noise.add_({"a": torch.zeros(4, dtype=torch.bfloat16)}, {"a": 1.0}, key=KEY)
    with pytest.raises(InvalidArgumentError, match="'b'"):
        noise.add_({"a": torch.zeros(4), "b": torch.zeros(4)}, {"a": 1.0}, key=KEY)


def test_measured_std_of_an_update_per_block_is_within_one_percent() -> None:
    """End to end on a model: an empty batch releases nothing but noise, divided by B."""
    model = make_bert(hidden=64, vocabulary=2000)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    private = make_private(
        model,
        optimizer,
        dataset_size=RECORDS,
        expected_batch_size=8,
        num_steps=1,
        delta=1e-3,
        noise_multiplier=0.4,
        unshuffled_noise_multiplier=3.0,
        accounting="paper",
        clip_norm=0.5,
        batch_clip_norm=2.0,
        shuffle="at-release",
        seed=1,
    )
    private.sampler = FixedSampler([])
    before = weights(model)
    case = Case(make=lambda: model, data=Sentences(), loss=classify_sentences)
    assert run(private, case) == []
    assert private.steps_taken == private.ledger.spent == 1
    after = weights(model)
    assert distance(before, after) > 0
    for block, multiplier in zip(private.plan.blocks, (0.4, 3.0), strict=True):
        moved = torch.cat([(after[n] - before[n]).flatten().double() for n in block.parameters])
        assert moved.numel() == block.dimension > 50_000
        assert float(moved.std()) == pytest.approx(multiplier * 0.5 / 8, rel=0.01)
