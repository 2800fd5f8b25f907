"""What must hold of estimates whatever the constants are."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch import nn

from shuffled_dpsgd.errors import UnsupportedModuleError
from shuffled_dpsgd.models import build_model
from shuffled_dpsgd.scaling import GPUS, Job, estimate, largest_batch, shapes_of
from shuffled_dpsgd.scaling.estimate import (
    LINK_SHARE,
    USABLE_MEMORY,
    fewest_gpus,
    memory_of,
    weak_scaling,
)

H100 = GPUS["h100"]
JOB = Job(gpus=4, length=128, logical_batch=1000, records=50_000, physical_batch=64)


def test_shapes_are_read_off_the_modules() -> None:
    shapes = shapes_of(build_model("gpt2"))
    assert (shapes.parameters, shapes.layers, shapes.width) == (124_439_808, 12, 768)
    assert shapes.logits == 50257
    assert shapes.stored_width == 12 * 16 * 768
    assert shapes.products == 12 * 12 * 768**2 + 50257 * 768
    assert shapes.largest_layer == 7_087_872
    assert shapes.outside_layers == (50257 + 1024 + 2) * 768
    assert shapes.largest_module == 50257 * 768
    assert shapes.composite_activation
    assert not shapes_of(build_model("bert-base")).composite_activation
    with pytest.raises(UnsupportedModuleError, match="num_hidden_layers"):
        shapes_of(nn.Linear(2, 2))


def test_the_largest_batch_is_the_largest_that_fits() -> None:
    shapes = shapes_of(build_model("gpt2-large"))
    most = largest_batch(shapes, H100, JOB)
    usable = USABLE_MEMORY * H100.memory
    assert memory_of(shapes, JOB, batch=most).peak <= usable
    assert memory_of(shapes, JOB, batch=most + 1).peak > usable
    assert largest_batch(shapes_of(build_model("llama-70b")), H100, JOB) == 0


def test_replicas_exchange_once_a_step_however_many_batches_it_has() -> None:
    shapes = shapes_of(build_model("gpt2"))
    once, often = (
        estimate(shapes, H100, replace(JOB, logical_batch=size)) for size in (256, 25_600)
    )
    assert once.exchange_bytes == often.exchange_bytes == 2 * 0.75 * 4 * shapes.parameters
    assert often.batches_per_rank == 100 * once.batches_per_rank
    assert often.samples_per_second > once.samples_per_second


def test_shards_need_less_memory_and_more_communication() -> None:
    shapes = shapes_of(build_model("gpt2-xl"))
    whole = estimate(shapes, H100, JOB)
    sharded = estimate(shapes, H100, replace(JOB, strategy="sharded"))
    assert sharded.memory.peak < whole.memory.peak
    assert sharded.exchange_bytes > whole.exchange_bytes


def test_shards_need_the_whole_model_on_no_rank() -> None:
    """Of 70 billion parameters a rank holds its share, what lies outside the blocks, and two."""
    shapes = shapes_of(build_model("llama-70b"))
    job = replace(JOB, gpus=64, strategy="sharded")
    memory = memory_of(shapes, job, batch=1)
    assert memory.gathered == 4 * (shapes.outside_layers + 2 * shapes.largest_layer)
    assert memory.gathered < 4 * shapes.parameters / 10
    assert estimate(shapes, GPUS["h200"], replace(job, physical_batch=1)).fits


def test_copies_of_shards_send_rows_between_nodes_and_layers_inside_them() -> None:
    shapes = shapes_of(build_model("llama-7b"))
    job = replace(JOB, gpus=64, logical_batch=64 * 32, physical_batch=4)
    whole, sharded, hybrid = (
        estimate(shapes, H100, replace(job, strategy=strategy))
        for strategy in ("replicated", "sharded", "hybrid")
    )
    weights = 4 * shapes.parameters
    # Eight batches, weights twice and sums once, to 7 of 8 ranks; then rows to 7 of 8 nodes.
    layers, rows = 8 * 3 * 7 / 8 * weights, 2 * 7 / 8 * weights / 8
    assert hybrid.exchange_bytes == pytest.approx(layers + rows)
    # A GPU has a link of 450 GB/s of its own, and an eighth of 400 GB/s between nodes.
    seconds = layers / (0.7 * 450e9) + rows / (0.7 * 50e9)
    assert hybrid.exchange_seconds == pytest.approx(seconds)
    assert hybrid.exchange_seconds < sharded.exchange_seconds
    assert sharded.memory.peak < hybrid.memory.peak < whole.memory.peak


def test_what_can_be_hidden_is_hidden_behind_computing_at_most() -> None:
    shapes = shapes_of(build_model("llama-7b"))
    job = replace(JOB, gpus=8, strategy="sharded", logical_batch=64)
    for size in (1, 8):
        one = estimate(shapes, H100, replace(job, physical_batch=size))
        hidden = one.step_seconds - one.hidden_step_seconds
        assert hidden == pytest.approx(min(one.exchange_seconds, one.compute_seconds))
        assert hidden > 0.0
    whole = estimate(shapes, H100, replace(job, strategy="replicated"))
    assert whole.hidden_step_seconds == whole.step_seconds


def test_weights_gathered_in_half_precision_take_half_the_bytes() -> None:
    shapes = shapes_of(build_model("llama-7b"))
    job = replace(JOB, gpus=8, strategy="sharded", physical_batch=8)
    full, half = (estimate(shapes, H100, replace(job, half=one)) for one in (False, True))
    assert half.exchange_bytes == pytest.approx(full.exchange_bytes * 8 / 12)
    assert half.memory.gathered == full.memory.gathered / 2
    assert half.memory.half_copies == 0


def test_one_gpu_exchanges_nothing_and_a_second_node_is_slower() -> None:
    shapes = shapes_of(build_model("gpt2"))
    one, eight, sixteen = weak_scaling(shapes, H100, JOB, [1, 8, 16], physical_batch=64)
    assert one.exchange_seconds == 0.0
    assert 0.0 < eight.exchange_seconds < sixteen.exchange_seconds
    # Two nodes of eight adapters of 50 GB/s, of which 70 % are assumed to be reached.
    assert sixteen.exchange_bytes / sixteen.exchange_seconds == pytest.approx(280e9)
    assert one.compute_seconds == eight.compute_seconds == sixteen.compute_seconds
    assert [e.job.logical_batch for e in (one, eight, sixteen)] == [250, 2000, 4000]


@pytest.mark.parametrize(
    ("rate", "efficiency"), [(35e9, 0.07), (216e9, 0.33), (260e9, 0.37), (280e9, 0.39)]
)
def test_what_rates_between_nodes_mean_for_llama(rate: float, efficiency: float) -> None:
    """A single adapter at 70 %, two rates that eight may have, and the one that is assumed: 64
    sharded H100s, 1000 samples of 128 tokens, nothing hidden."""
    shapes = shapes_of(build_model("llama-7b"))
    job = replace(JOB, gpus=64, strategy="sharded", physical_batch=65)
    one = estimate(shapes, replace(H100, network=rate / LINK_SHARE), job)
    busy = one.compute_seconds + one.update_seconds
    assert busy / one.step_seconds == pytest.approx(efficiency, abs=0.006)


def test_smaller_shards_leave_room_for_larger_physical_batches() -> None:
    shapes, h200 = shapes_of(build_model("llama-70b")), GPUS["h200"]
    job = replace(JOB, gpus=8, strategy="sharded")
    few, many = weak_scaling(shapes, h200, job, [16, 256], physical_batch=None)
    assert few.fits
    assert few.batches_per_rank > 2 * many.batches_per_rank
    assert few.exchange_seconds > 2 * many.exchange_seconds
    assert fewest_gpus(shapes, h200, job) == 16
