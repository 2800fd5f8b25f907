"""Noise: the right distribution, per block, in float32 or better, in bounded memory."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats

from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.training import GaussianNoise, RandomStreams, make_private
from shuffled_dpsgd.training.flat import abutting, merged
from shuffled_dpsgd.training.noise import Stretch
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_noise_is_gaussian_with_the_std_asked_for(dtype: torch.dtype) -> None:
    sums = {"a": torch.zeros(700, 500, dtype=dtype), "b": torch.zeros(300_001, dtype=dtype)}
    GaussianNoise(RandomStreams(seed=4)).add_(sums, {"a": 2.0, "b": 0.5}, step=3)
    for name, std in {"a": 2.0, "b": 0.5}.items():
        drawn = sums[name].flatten().double().numpy() / std
        assert drawn.std() == pytest.approx(1.0, rel=0.01)
        assert abs(drawn.mean()) < 5 / math.sqrt(drawn.size)
        assert stats.kstest(drawn, "norm").pvalue > 1e-4


def test_the_accelerator_s_draw_is_gaussian_and_reaches_every_coordinate() -> None:
    """The code path of a GPU, on a CPU generator, with tensors larger and smaller than a pack."""
    sizes = (7, 3 << 23, 1 << 10, 400_000)
    flats = [torch.zeros(size) for size in sizes]
    stretches = [Stretch(flat, 2.0, 0) for flat in flats]
    noise = GaussianNoise(RandomStreams(seed=4))
    noise._add_on_accelerator(stretches, step=0, index=0, divide_by=4.0)
    for flat in flats:
        assert float((flat == 0.0).float().mean()) < 1e-5
    assert float(flats[1].std()) == pytest.approx(0.5, rel=0.001)
    assert stats.kstest(flats[3].numpy() / 0.5, "norm").pvalue > 1e-4
    assert abs(float(torch.corrcoef(torch.stack([flats[1][:400_000], flats[3]]))[0, 1])) < 0.01


def drawn_into(tensors: dict[str, torch.Tensor], stds: dict[str, float]) -> torch.Tensor:
    GaussianNoise(RandomStreams(seed=4)).add_(tensors, stds, step=2, divide_by=8.0)
    return torch.cat([tensor.flatten() for tensor in tensors.values()])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_layout_in_memory_changes_no_bit(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one buffer, in several, and in one buffer in another order; across borders of pieces."""
    monkeypatch.setattr("shuffled_dpsgd.training.noise._PIECE_CPU", 1 << 16)
    shapes = {"a": (70_001,), "b": (300, 500), "c": (3, 4, 5), "d": (40_000,)}
    stds = {"a": 1.0, "b": 1.0, "c": 2.0, "d": 2.0}

    def in_one_buffer(order: str) -> dict[str, torch.Tensor]:
        like = [torch.empty(shapes[name]) for name in order]
        buffer = torch.ones(sum(t.numel() for t in like), dtype=dtype)
        views = dict(zip(order, torch._utils._unflatten_dense_tensors(buffer, like), strict=True))
        return {name: views[name] for name in shapes}

    together = in_one_buffer("abcd")
    assert [flat.numel() for flat in merged(list(together.values()))] == [260_061]
    apart = {name: torch.ones(shape, dtype=dtype) for name, shape in shapes.items()}
    expected = drawn_into(apart, stds)
    assert float(expected[:220_001].std()) == pytest.approx(1 / 8, rel=0.01)
    assert float(expected[220_001:].std()) == pytest.approx(2 / 8, rel=0.02)
    assert torch.equal(drawn_into(together, stds), expected)
    assert torch.equal(drawn_into(in_one_buffer("dacb"), stds), expected)


def test_only_neighbours_in_one_storage_are_merged() -> None:
    buffer = torch.arange(24.0)
    first, gap, last = buffer[:6].view(2, 3), buffer[7:12], buffer[12:24].view(3, 4)
    assert [t.tolist() for t in merged([gap, last])] == [list(range(7, 24))]
    assert len(merged([first, gap])) == 2
    assert len(merged([last, gap])) == 2
    assert len(merged([torch.zeros(2), torch.zeros(2)])) == 2
    assert len(abutting([first.t(), buffer[6:12]])) == 2


def test_the_sum_is_divided_even_where_there_is_no_noise() -> None:
    sums = {"a": torch.full((5,), 6.0), "b": torch.full((5,), 6.0), "c": torch.zeros(0)}
    noise = GaussianNoise(RandomStreams(seed=4))
    noise.add_(sums, {"a": 0.0, "b": 1.0, "c": 1.0}, step=0, divide_by=4.0)
    assert torch.equal(sums["a"], torch.full((5,), 1.5))
    alone = {"x": torch.zeros(5), "b": torch.full((5,), 6.0)}
    noise.add_(alone, {"x": 0.0, "b": 1.0}, step=0)
    assert torch.equal(sums["b"], alone["b"] / 4)


def test_noise_differs_between_steps_and_tensors_and_repeats_with_the_seed() -> None:
    def draw(step: int) -> dict[str, torch.Tensor]:
        sums = {"a": torch.zeros(1000), "b": torch.zeros(1000)}
        GaussianNoise(RandomStreams(seed=4)).add_(sums, {"a": 1.0, "b": 1.0}, step=step)
        return sums

    first, second, again = draw(0), draw(1), draw(0)
    assert torch.equal(first["a"], again["a"])
    for one, other in ((first["a"], second["a"]), (first["a"], first["b"])):
        assert abs(float(torch.corrcoef(torch.stack([one, other]))[0, 1])) < 0.15


def test_the_number_of_threads_changes_no_bit() -> None:
    def draw() -> torch.Tensor:
        sums = {"a": torch.zeros(1_000_000), "b": torch.zeros(600_000)}
        GaussianNoise(RandomStreams(seed=4)).add_(sums, {"a": 1.0, "b": 2.0}, step=1)
        return torch.cat(list(sums.values()))

    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = draw()
        torch.set_num_threads(3)
        shared = draw()
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(alone, shared)
    assert float(alone[:1_000_000].std()) == pytest.approx(1.0, rel=0.01)


def test_noise_needs_no_second_buffer_of_the_size_of_the_tensor() -> None:
    import tracemalloc

    sums = {"a": torch.zeros(32_000_000)}
    noise = GaussianNoise(RandomStreams(seed=4))
    with torch.profiler.profile(profile_memory=True) as profile:
        noise.add_(sums, {"a": 1.0}, step=0)
    by_torch = max(event.cpu_memory_usage for event in profile.key_averages())
    tracemalloc.start()
    noise.add_(sums, {"a": 1.0}, step=0)
    by_numpy = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # Each thread works on a piece of its own.
    share = 0.05 * torch.get_num_threads()
    assert 0 < max(by_torch, by_numpy) < share * sums["a"].numel() * 4


def test_narrow_sums_and_forgotten_tensors_are_refused() -> None:
    noise = GaussianNoise(RandomStreams(seed=4))
    with pytest.raises(InvalidArgumentError, match="float32 or float64"):
        noise.add_({"a": torch.zeros(4, dtype=torch.bfloat16)}, {"a": 1.0}, step=0)
    with pytest.raises(InvalidArgumentError, match="'b'"):
        noise.add_({"a": torch.zeros(4), "b": torch.zeros(4)}, {"a": 1.0}, step=0)


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
