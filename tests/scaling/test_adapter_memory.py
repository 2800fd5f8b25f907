"""Memory and messages of adapters, by hand for a model whose numbers are easy to count."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.models import build_model
from shuffled_dpsgd.scaling import GPUS, AdapterJob, Job, adapter_memory, shapes_of
from shuffled_dpsgd.scaling.adapters import adapter_exchange

SHAPES = shapes_of(build_model("llama-8b"))
JOB = AdapterJob(rank=16, bits=4, length=1024, batch=4)
# Numbers of a block's linear maps, of the words and norms, and of adapters of rank 16.
BLOCK = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336
OTHERS = 2 * 128256 * 4096 + (2 * 32 + 1) * 4096
TRAINED = 32 * 16 * (2 * 8192 + 2 * 5120 + 3 * 18432)


def test_terms_are_those_of_the_docstring() -> None:
    found = adapter_memory(SHAPES, JOB)
    assert found.frozen_linear_maps == 32 * BLOCK * (4 / 8 + 4 / 64)
    assert found.frozen_others == 2 * OTHERS
    assert found.unpacked_map == 2 * 4096 * 14336
    assert found.gathered == 0
    assert found.adapters == 18 * TRAINED + 4 * 16 * 18432
    assert found.sample_gradients == 4 * 4 * TRAINED
    width = 2 * 8192 + 2 * 5120 + 3 * 18432
    assert found.activations == pytest.approx(4096 * (2.7 * width + 2 * 32 * 4096))
    assert found.logits == 10.6 * 4096 * 128256


def test_more_bits_and_no_checkpointing_take_more() -> None:
    peaks = [adapter_memory(SHAPES, replace(JOB, bits=bits)).peak for bits in (4, 8, 16)]
    assert peaks == sorted(peaks)
    assert adapter_memory(SHAPES, replace(JOB, checkpointing=False)).peak > peaks[0]
    short = replace(JOB, length=4)
    assert adapter_memory(SHAPES, short).sample_gradients < 4 * 4 * 41_943_040


def launch(**changes: Any) -> Job:
    return Job(**{"length": 1024, "records": 1, "physical_batch": 1} | changes)


def test_replicated_ranks_exchange_adapters_alone() -> None:
    """Four ranks send 2 · 3/4 of the sums, whatever bits and batches are, by NVLink."""
    for bits, logical in ((4, 64), (16, 6400)):
        job = replace(JOB, bits=bits, launch=launch(gpus=4, logical_batch=logical))
        sent, seconds = adapter_exchange(SHAPES, GPUS["h100"], job)
        assert sent == 2 * 3 / 4 * 4 * TRAINED
        assert seconds == pytest.approx(sent / (0.7 * 450e9))
        # As much as the sums once more: the vector that is exchanged.
        assert adapter_memory(SHAPES, job).adapters == (18 + 4) * TRAINED + 4 * 16 * 18432


def test_sharded_ranks_gather_the_frozen_weights_and_reduce_adapters() -> None:
    """16 ranks with two batches of four samples each; in copies, eight ranks share one."""
    sharded, hybrid = (
        replace(JOB, bits=16, launch=launch(gpus=16, logical_batch=128, strategy=each))
        for each in ("sharded", "hybrid")
    )
    # Frozen weights in two bytes and adapters in four, before forward and backward; sums once.
    of_layers = 2 * (2 * (2 * (32 * BLOCK + OTHERS) + 4 * TRAINED) + 4 * TRAINED)
    sent, seconds = adapter_exchange(SHAPES, GPUS["h100"], sharded)
    assert sent == pytest.approx(15 / 16 * of_layers)
    assert seconds == pytest.approx(15 / 16 * of_layers / (0.7 * 400e9))
    # Two copies: rows of the sums there and back, by an eighth of a node's adapters.
    layers, rows = 7 / 8 * of_layers, 2 * 1 / 2 * 4 * TRAINED / 8
    sent, seconds = adapter_exchange(SHAPES, GPUS["h100"], hybrid)
    assert sent == pytest.approx(layers + rows)
    assert seconds == pytest.approx(layers / (0.7 * 450e9) + rows / (0.7 * 50e9))
    for job, ranks, held in ((sharded, 16, 16), (hybrid, 8, 20)):
        found = adapter_memory(SHAPES, job)
        assert found.frozen_linear_maps == 2 * 32 * BLOCK / ranks
        assert found.frozen_others == 2 * OTHERS / ranks
        assert found.adapters == (held / ranks + 2) * TRAINED + 4 * 16 * 18432
        # Words and the last norm, two blocks with their norms and adapters, and an adapter's sums.
        whole = 2 * (2 * 128256 * 4096 + 4096) + 2 * 2 * (BLOCK + 2 * 4096)
        assert found.gathered == whole + 4 * 2 * TRAINED / 32 + 3 * 4 * 16 * 18432


def test_quantised_weights_are_not_sharded() -> None:
    job = replace(JOB, launch=launch(gpus=4, logical_batch=4, strategy="sharded"))
    with pytest.raises(InvalidArgumentError, match="whole weights if quantised"):
        adapter_memory(SHAPES, job)
