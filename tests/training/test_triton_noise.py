"""The GPU kernel's noise: on a GPU, else in Triton's interpreter, against numpy in float64.

Skipped where Triton is not installed.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from shuffled_dpsgd.training.philox_reference import expected_normals, philox

from on_triton import DEVICE, ON_GPU
from shuffled_dpsgd.core.noise import Stretch
from shuffled_dpsgd.runtime.routes import WrongResult
from shuffled_dpsgd.training import GaussianNoise, RandomStreams, noise_route, triton_noise
from shuffled_dpsgd.training.triton_noise import add_normal_
from waiting import waiting_is_an_error

KEY = (0x243F6A88, 0x85A308D3, 0xFFFFFFFF, 0x7FFFFFFF)


def normals(size: int, *, first: int = 0, key: tuple[int, int, int, int] = KEY) -> torch.Tensor:
    drawn = torch.zeros(size, device=DEVICE)
    add_normal_(drawn, key=key, first=first, std=1.0, divide_by=1.0)
    return drawn


def kolmogorov_distance(drawn: torch.Tensor) -> float:
    """sqrt(n) times the largest distance from the normal distribution; above 2.2 once in 8000."""
    found = torch.special.ndtr(drawn.double().sort().values)
    steps = torch.arange(found.numel() + 1, device=found.device) / found.numel()
    apart = torch.maximum((found - steps[1:]).abs(), (found - steps[:-1]).abs())
    return math.sqrt(found.numel()) * float(apart.max())


def test_the_reference_is_philox() -> None:
    """The known answers that Random123 is published with."""
    zeros = philox([np.zeros(1)] * 4, (0, 0))
    assert [int(w[0]) for w in zeros] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    pi = [np.array([w]) for w in (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)]
    found = philox(pi, (0xA4093822, 0x299F31D0))
    assert [int(w[0]) for w in found] == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]


def test_a_trial_sees_noise_that_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    noise_route.try_kernel(torch.device(DEVICE))

    def weaker(flat: torch.Tensor, *, std: float, **options: Any) -> None:
        add_normal_(flat, std=0.99 * std, **options)

    monkeypatch.setattr(triton_noise, "add_normal_", weaker)
    with pytest.raises(WrongResult, match="noise off by"):
        noise_route.try_kernel(torch.device(DEVICE))


def test_every_number_is_that_of_its_key_and_place() -> None:
    expected, _ = expected_normals(KEY, range(5))
    assert normals(5 * 4096).double().cpu().numpy() == pytest.approx(expected, rel=1e-5, abs=5e-5)


def test_the_smallest_words_are_refined() -> None:
    block = next(b for b in range(1000) if expected_normals(KEY, range(b, b + 1))[1])
    expected, _ = expected_normals(KEY, range(block, block + 1))
    assert np.hypot(*expected.reshape(2, 2, 1024).transpose(1, 0, 2)).max() > 4.7
    found = normals(4096, first=block * 4096).double().cpu().numpy()
    assert found == pytest.approx(expected, rel=1e-5, abs=5e-5)


def test_places_past_32_bits_have_counters_of_their_own() -> None:
    block = (1 << 32) // 1024 + 3
    expected, _ = expected_normals(KEY, range(block, block + 1))
    found = normals(4096, first=block * 4096).double().cpu().numpy()
    assert found == pytest.approx(expected, rel=1e-5, abs=5e-5)


@pytest.mark.parametrize(
    ("first", "size"), [(0, 1), (1, 1), (5, 4096), (4095, 2), (4096, 9000), (16, 4080), (700, 3000)]
)
def test_where_a_call_begins_and_ends_changes_no_number(first: int, size: int) -> None:
    guarded = torch.full((size + 64,), 9.0, device=DEVICE)
    add_normal_(guarded[32:-32], key=KEY, first=first, std=0.5, divide_by=4.0)
    assert (guarded[:32] == 9.0).all()
    assert (guarded[-32:] == 9.0).all()
    whole = normals(4 * 4096)[first : first + size]
    assert torch.equal(guarded[32:-32], (9.0 + 0.5 * whole) * 0.25)


def test_every_word_of_the_key_matters() -> None:
    plain = normals(4096)
    for place in range(4):
        other = tuple(word ^ (index == place) for index, word in enumerate(KEY))
        changed = normals(4096, key=other)  # type: ignore[arg-type]
        assert abs(float(torch.corrcoef(torch.stack([plain, changed]))[0, 1])) < 0.08


def test_noise_of_a_step_comes_from_the_run_s_streams() -> None:
    """What `add_` does on a GPU: every step and every kind of sum has a key of its own."""

    def draw(step: int, index: int, streams: RandomStreams) -> torch.Tensor:
        flat = torch.zeros(9000, device=DEVICE)
        parts = [Stretch(flat[:5000], 1.0, 0), Stretch(flat[5000:], 1.0, 5000)]
        GaussianNoise(streams)._add_by_kernel(parts, step=step, index=index, divide_by=1.0)
        return flat

    seeded, secure = RandomStreams(seed=3), RandomStreams()
    assert torch.equal(draw(5, 0, seeded), normals(9000, key=seeded.words("noise", 5)))
    drawn = [draw(5, 0, seeded), draw(6, 0, seeded), draw(5, 1, seeded)]
    drawn += [draw(5, 0, secure), draw(5, 0, secure)]
    correlations = torch.corrcoef(torch.stack(drawn)) - torch.eye(5, device=DEVICE)
    assert float(correlations.abs().max()) < 0.06


def test_the_numbers_are_normal() -> None:
    assert kolmogorov_distance(normals(100_000)) < 2.2


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
def test_a_hundred_million_numbers_are_normal() -> None:
    n = 100_000_000
    drawn = normals(n)
    assert torch.equal(drawn, normals(n))
    wide = drawn.double()
    assert abs(float(wide.mean())) < 5 / math.sqrt(n)
    assert abs(float(wide.square().mean()) - 1) < 5 * math.sqrt(2 / n)
    assert abs(float(wide.pow(4).mean()) - 3) < 5 * math.sqrt(96 / n)
    for threshold in (1.0, 2.0, 3.0, 4.0, 5.0):
        expected = n * math.erfc(threshold / math.sqrt(2))
        found = int((wide.abs() > threshold).sum())
        assert abs(found - expected) < 5 * math.sqrt(expected)
    assert int((wide.abs() > 6.0).sum()) <= 6
    for lag in (1, 4, 1024, 2048, 4096):
        a, b = wide[:-lag], wide[lag:]
        assert abs(float((a * b).mean())) < 5 / math.sqrt(n)
        assert abs(float(((a * a - 1) * (b * b - 1)).mean())) < 5 * 2 / math.sqrt(n)
    other = normals(n, key=(KEY[0] + 1, *KEY[1:]))
    assert abs(float((wide * other).mean())) < 5 / math.sqrt(n)
    assert kolmogorov_distance(drawn[::50]) < 2.2


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
def test_a_step_does_not_wait_for_the_device() -> None:
    sums = {"a": torch.zeros(1000, 700, device="cuda"), "b": torch.zeros(300, device="cuda")}
    noise = GaussianNoise(RandomStreams(seed=1))
    noise.add_(sums, {"a": 1.0, "b": 2.0}, step=0, divide_by=2.0)
    with waiting_is_an_error():
        noise.add_(sums, {"a": 1.0, "b": 2.0}, step=1, divide_by=2.0)
