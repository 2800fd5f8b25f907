"""Memory of adapters, by hand for a model whose numbers are easy to count."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shuffled_dpsgd.models import build_model
from shuffled_dpsgd.scaling import AdapterJob, adapter_memory, shapes_of

SHAPES = shapes_of(build_model("llama-8b"))
JOB = AdapterJob(rank=16, bits=4, length=1024, batch=4)


def test_terms_are_those_of_the_docstring() -> None:
    found = adapter_memory(SHAPES, JOB)
    block = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336
    assert found.frozen_linear_maps == 32 * block * (4 / 8 + 4 / 64)
    assert found.frozen_others == 2 * (2 * 128256 * 4096 + (2 * 32 + 1) * 4096)
    assert found.unpacked_map == 2 * 4096 * 14336
    trained = 32 * 16 * (2 * 8192 + 2 * 5120 + 3 * 18432)
    assert found.adapters == 18 * trained + 4 * 16 * 18432
    assert found.sample_gradients == 4 * 4 * trained
    width = 2 * 8192 + 2 * 5120 + 3 * 18432
    assert found.activations == pytest.approx(4096 * (2.7 * width + 2 * 32 * 4096))
    assert found.logits == 10.6 * 4096 * 128256


def test_more_bits_and_no_checkpointing_take_more() -> None:
    peaks = [adapter_memory(SHAPES, replace(JOB, bits=bits)).peak for bits in (4, 8, 16)]
    assert peaks == sorted(peaks)
    assert adapter_memory(SHAPES, replace(JOB, checkpointing=False)).peak > peaks[0]
    short = replace(JOB, length=4)
    assert adapter_memory(SHAPES, short).sample_gradients < 4 * 4 * 41_943_040
