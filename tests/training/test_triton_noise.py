"""The GPU kernel's noise: on a GPU, else in Triton's interpreter, against the core's definition.

Skipped where Triton is not installed.
"""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import pytest
import torch
import triton
import triton.language as tl

from on_triton import DEVICE, ON_GPU
from shuffled_dpsgd.core import noise, streams
from shuffled_dpsgd.core.noise import LANES, GaussianNoise, Place
from shuffled_dpsgd.runtime.backends import WrongResult
from shuffled_dpsgd.training import device_noise, triton_noise
from shuffled_dpsgd.training.device_noise import DeviceNoise, add_by_kernel_, try_kernel
from shuffled_dpsgd.training.triton_noise import _chacha_block, add_normal_
from waiting import waiting_is_an_error

KEY = bytes(range(112, 144))
TILE = 2 * LANES


def drawn(size: int, *, first: int = 0, group: int = 0, key: bytes = KEY) -> torch.Tensor:
    numbers = torch.zeros(size, device=DEVICE)
    add_normal_(numbers, key=key, place=Place(group, first), std=1.0, divide_by=1.0)
    return numbers


@triton.jit
def blocks_kernel(out, stream, group, k0, k1, k2, k3, k4, k5, k6, k7):  # type: ignore[no-untyped-def]  # fmt: skip
    """Blocks 1 to 4, each word's four side by side."""
    lane = tl.arange(0, 4)
    words = _chacha_block(
        lane.to(tl.uint32) + 1, stream.to(tl.uint32, bitcast=True),
        group.to(tl.uint32, bitcast=True), k0, k1, k2, k3, k4, k5, k6, k7,
    )  # fmt: skip
    for i in tl.static_range(16):
        tl.store(out + 4 * i + lane, words[i].to(tl.int32, bitcast=True))


def test_the_block_function_is_chacha20() -> None:
    """The block of RFC 8439, section 2.3.2; the blocks after it are OpenSSL's."""
    key, stream, group = bytes(range(32)), 0x09000000, 0x4A000000
    out = torch.zeros(16, 4, dtype=torch.int32, device=DEVICE)
    key_words = [int.from_bytes(key[i : i + 4], "little") for i in range(0, 32, 4)]
    blocks_kernel[(1,)](out, stream, group, *key_words)
    published = """
        e4e7f110 15593bd1 1fdd0f50 c47120a3 c7f4d1c7 0368c033 9aaa2204 4e6cd4c3
        466482d2 09aa9f07 05d7c214 a2028bd9 d19c12b5 b94e16de e883d0cb 4e3c50a2
    """
    assert [f"{word & 0xFFFFFFFF:08x}" for word in out[:, 0].tolist()] == published.split()
    expected = streams.words(key, 16, 64, stream=stream, group=group).reshape(4, 16)
    assert out.T.tolist() == expected.tolist()


def test_every_number_is_that_of_its_key_and_place() -> None:
    found = drawn(TILE + 100, first=3 * TILE, group=5)
    expected = noise.normals(KEY, 5, 3 * TILE, TILE + 100)
    assert (found.cpu() - expected).abs().max() < 3e-6
    for at in (0, 1, 2047, 2048, LANES - 1, LANES, LANES + 77, TILE - 1, TILE, TILE + 99):
        assert float(found[at]) == pytest.approx(
            noise.normal(KEY, Place(5, 3 * TILE + at)), abs=3e-6
        )


@pytest.mark.slow
def test_small_words_have_their_low_bits_too() -> None:
    """Where A is a small number, the radius depends on B: the tail is as fine as the centre."""
    words = streams.words(KEY, 0, 1 << 20) & 0x7FFFFFFF
    pair = int(words.argmin())
    assert words[pair] < 1 << 12
    first = pair // LANES * TILE
    expected = [noise.normal(KEY, Place(0, first + pair % LANES + i)) for i in (0, LANES)]
    assert math.hypot(*expected) > 5.0
    found = [drawn(1, first=first + pair % LANES + i) for i in (0, LANES)]
    assert [float(number) for number in found] == pytest.approx(expected, abs=3e-6)


def test_places_past_32_bits_have_blocks_of_their_own() -> None:
    first = (1 << 33) + 3 * TILE
    found = drawn(100, first=first)
    assert (found.cpu() - noise.normals(KEY, 0, first, 100)).abs().max() < 3e-6


@pytest.mark.parametrize(
    ("first", "size"),
    [
        (5, 700),
        (TILE - 1, 2),
        (700, TILE + 1),
        pytest.param(0, 1, marks=pytest.mark.slow),
        pytest.param(LANES - 1, 2, marks=pytest.mark.slow),
        pytest.param(LANES + 16, 4080, marks=pytest.mark.slow),
    ],
)
def test_where_a_call_begins_and_ends_changes_no_number(first: int, size: int) -> None:
    guarded = torch.full((size + 64,), 9.0, device=DEVICE)
    add_normal_(guarded[32:-32], key=KEY, place=Place(0, first), std=0.5, divide_by=4.0)
    assert (guarded[:32] == 9.0).all()
    assert (guarded[-32:] == 9.0).all()
    expected = (9.0 + 0.5 * noise.normals(KEY, 0, 0, first + size)[first:]) / 4.0
    assert (guarded[32:-32].cpu() - expected).abs().max() < 2e-6


def test_a_release_is_the_definition_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums side by side, of another std, apart, empty, and of another place; in four launches."""
    launch = mock.Mock(wraps=add_normal_)
    monkeypatch.setattr(triton_noise, "add_normal_", launch)

    def sums_in(buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        return {
            "a": buffer[:900].view(30, 30),
            "b": buffer[900:1500],
            "other std": buffer[1500:2000],
            "empty": buffer.new_zeros(0),
            "apart": buffer.new_ones(50),
            "elsewhere": buffer[2000:],
        }

    on_device, sums = sums_in(torch.arange(3000.0, device=DEVICE)), sums_in(torch.arange(3000.0))
    places = noise.number(sums) | {"elsewhere": Place(1, 12345)}
    stds = dict.fromkeys(sums, 0.5) | {"other std": 2.0, "apart": 0.0}
    add_by_kernel_(on_device, stds, key=KEY, places=places, divide_by=4.0)
    assert launch.call_count == 4
    GaussianNoise().add_(sums, stds, key=KEY, places=places, divide_by=4.0)
    for name, expected in sums.items():
        torch.testing.assert_close(on_device[name].cpu(), expected, atol=3e-6, rtol=1e-6)


@pytest.mark.slow
def test_a_trial_sees_noise_that_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    try_kernel(torch.device(DEVICE))

    def weaker(flat: torch.Tensor, *, std: float, **options: Any) -> None:
        add_normal_(flat, std=0.99 * std, **options)

    monkeypatch.setattr(triton_noise, "add_normal_", weaker)
    with pytest.raises(WrongResult, match="noise off by"):
        try_kernel(torch.device(DEVICE))


def test_sums_that_the_kernel_does_not_serve_have_the_same_noise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """float32 by the kernel and float64 by the definition, in one release."""
    monkeypatch.setattr(device_noise, "may_take_kernel", lambda t: t.dtype == torch.float32)
    sums = {"a": torch.zeros(100), "wide": torch.zeros(70, dtype=torch.float64)}
    expected = {name: tensor.clone() for name, tensor in sums.items()}
    on_device = {name: tensor.to(DEVICE) for name, tensor in sums.items()}
    stds, places = dict.fromkeys(sums, 1.0), noise.number(sums)
    DeviceNoise().add_(on_device, stds, key=KEY, places=places, divide_by=1.0)
    GaussianNoise().add_(expected, stds, key=KEY, places=places, divide_by=1.0)
    assert (on_device["a"].cpu() - expected["a"]).abs().max() < 3e-6
    assert torch.equal(on_device["wide"].cpu(), expected["wide"])


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
def test_a_hundred_million_numbers_are_normal() -> None:
    n = 100_000_000
    numbers = drawn(n)
    assert torch.equal(numbers, drawn(n))
    assert (numbers[-TILE:].cpu() - noise.normals(KEY, 0, 0, n)[-TILE:]).abs().max() < 3e-6
    wide = numbers.double()
    assert abs(float(wide.mean())) < 5 / math.sqrt(n)
    assert abs(float(wide.square().mean()) - 1) < 5 * math.sqrt(2 / n)
    assert abs(float(wide.pow(4).mean()) - 3) < 5 * math.sqrt(96 / n)
    for threshold in (1.0, 2.0, 3.0, 4.0, 5.0):
        expected = n * math.erfc(threshold / math.sqrt(2))
        found = int((wide.abs() > threshold).sum())
        assert abs(found - expected) < 5 * math.sqrt(expected)
    for lag in (1, 16, LANES, TILE):
        a, b = wide[:-lag], wide[lag:]
        assert abs(float((a * b).mean())) < 5 / math.sqrt(n)
        assert abs(float(((a * a - 1) * (b * b - 1)).mean())) < 5 * 2 / math.sqrt(n)


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
def test_a_step_does_not_wait_for_the_device() -> None:
    sums = {"a": torch.zeros(1000, 700, device="cuda"), "b": torch.zeros(300, device="cuda")}
    places, stds = noise.number(sums), {"a": 1.0, "b": 2.0}
    source = DeviceNoise()
    source.add_(sums, stds, key=KEY, places=places, divide_by=2.0)
    with waiting_is_an_error():
        source.add_(sums, stds, key=KEY, places=places, divide_by=2.0)
