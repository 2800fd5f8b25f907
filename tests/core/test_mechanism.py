"""The mechanism: neighbouring sums stay neighbours, whatever the batch clip does."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shuffled_dpsgd.training import (
    GaussianNoise,
    PrivacyOptions,
    PrivacyPlan,
    RandomStreams,
    ShuffledGaussianMechanism,
    make_plan,
)
from shuffled_dpsgd.training.metrics import Release


def plan(**changes: Any) -> PrivacyPlan:
    request: dict[str, Any] = {
        "dataset_size": 100,
        "expected_batch_size": 5,
        "num_steps": 1,
        "delta": 1e-5,
        "noise_multiplier": 0.0,
        "batch_clip_norm": 1.0,
        "seed": 0,
    }
    sizes = {"moved": 12, "fixed": 4}
    return make_plan(PrivacyOptions(**(request | changes)), sizes=sizes, moved=frozenset({"moved"}))


def release(plan: PrivacyPlan, total: torch.Tensor, step: int = 0) -> torch.Tensor:
    sums = {"moved": total[:12].clone(), "fixed": total[12:].clone()}
    key = RandomStreams(seed=plan.seed).key("noise", step)
    ShuffledGaussianMechanism(plan, GaussianNoise()).privatize(sums, key=key)
    return torch.cat([sums["moved"], sums["fixed"]])


@given(
    seed=st.integers(0, 10_000),
    scale=st.floats(0.0, 50.0),
    batch_clip=st.floats(0.01, 20.0),
    clip=st.floats(0.01, 5.0),
)
@settings(max_examples=60, deadline=None)
def test_one_record_moves_the_release_by_at_most_the_clip(
    seed: int, scale: float, batch_clip: float, clip: float
) -> None:
    """The batch clip is a projection on a ball, and those do not expand distances."""
    generator = torch.Generator().manual_seed(seed)
    total = scale * torch.randn(16, generator=generator, dtype=torch.float64)
    record = torch.randn(16, generator=generator, dtype=torch.float64)
    record *= clip / record.norm()
    found = plan(batch_clip_norm=batch_clip, clip_norm=clip)
    moved = release(found, total + record) - release(found, total)
    assert float(moved.norm()) <= clip / 5 * (1 + 1e-9)


def test_sums_inside_the_ball_are_only_divided() -> None:
    total = torch.full((16,), 0.01, dtype=torch.float64)
    assert torch.allclose(release(plan(), total), total / 5, rtol=1e-15)


def test_signal_to_noise_compares_norms() -> None:
    found = plan(noise_multiplier=2.0, clip_norm=0.5)
    sums = {"moved": torch.full((12,), 10.0), "fixed": torch.zeros(4)}
    noise = GaussianNoise()
    norms = ShuffledGaussianMechanism(found, noise).privatize(sums, key=bytes(32))
    record = Release.of(found, norms)
    shuffled, _ = record.blocks
    assert shuffled.sum_norm == pytest.approx(10 * math.sqrt(12))
    assert shuffled.sum_norm * shuffled.batch_clip_factor == pytest.approx(1.0)
    assert record.signal_to_noise == pytest.approx(1.0 / (2.0 * 0.5 * math.sqrt(16)))


def test_every_step_draws_noise_of_its_own() -> None:
    found = plan(noise_multiplier=1.0)
    zero = torch.zeros(16, dtype=torch.float64)
    first, second = release(found, zero, step=0), release(found, zero, step=1)
    assert not torch.equal(first, second)
    assert torch.equal(first, release(found, zero, step=0))


def test_blocks_are_clipped_and_measured_alike_wherever_their_sums_lie() -> None:
    """In one buffer or apart, of one dtype or two."""
    found = plan(batch_clip_norm=0.5)

    def record(sums: dict[str, torch.Tensor]) -> tuple[Release, torch.Tensor]:
        noise = GaussianNoise()
        norms = ShuffledGaussianMechanism(found, noise).privatize(sums, key=bytes(32))
        return Release.of(found, norms), torch.cat([sums["moved"].double(), sums["fixed"].double()])

    buffer = torch.arange(16.0)
    apart = {"moved": buffer[:12].clone(), "fixed": buffer[12:].clone()}
    mixed = {"moved": buffer[:12].double(), "fixed": buffer[12:].clone()}
    together = {"moved": buffer[:12], "fixed": buffer[12:]}
    expected, values = record(mixed)
    assert expected.blocks[0].batch_clip_factor == pytest.approx(0.5 / math.sqrt(506))
    assert expected.blocks[1].batch_clip_factor == 1.0
    for sums in (apart, together):
        other, same = record(sums)
        assert torch.allclose(same, values, rtol=1e-6)
        for one, two in zip(other.blocks, expected.blocks, strict=True):
            assert one.sum_norm == pytest.approx(two.sum_norm, rel=1e-12)
