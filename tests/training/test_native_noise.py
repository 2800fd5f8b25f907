"""Noise in C: numpy's numbers to rounding, tails included, and numpy where it does not serve."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from shuffled_dpsgd.runtime import notices, routes
from shuffled_dpsgd.training import GaussianNoise, RandomStreams, box_muller, native_noise
from shuffled_dpsgd.training.box_muller import NoisedPart, standard_normal
from shuffled_dpsgd.training.noise_route import C_ROUTE, try_c
from training.test_box_muller import check_normal

CPU = torch.device("cpu")
FLOAT32 = np.dtype(np.float32)
NINTH = pow(9, -1, 1 << 64)


def sfc(seed: int) -> np.random.Generator:
    return np.random.Generator(np.random.SFC64(seed))


def drawn(rng: np.random.Generator, size: int) -> np.ndarray:
    out = np.empty(size + size % 2, dtype=np.float32)
    native_noise.fill_normal(rng, size, out)
    return out[:size]


def exact(seed: int, size: int) -> np.ndarray:
    """Box and Muller's transform in float64, without second draws."""
    pairs = -(-size // 2)
    words = sfc(seed).integers(0, (1 << 64) - 1, pairs, np.uint64, endpoint=True).view(np.uint32)
    radius = np.sqrt(-2 * np.log(((words[:pairs] >> 1) + 0.5) * 2.0**-31))
    angle = words[pairs:].view(np.int32) * np.pi * 2.0**-31
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:size]


@pytest.mark.parametrize("size", [0, 1, 2, 7, 1023, 1024, 1025, 70_001])
@pytest.mark.parametrize("seed", [0, 1])
def test_numbers_are_numpys_to_rounding(size: int, seed: int) -> None:
    np.testing.assert_allclose(
        drawn(sfc(seed), size), standard_normal(sfc(seed), size, FLOAT32), rtol=0, atol=4e-6
    )


def test_numbers_are_those_of_the_transform_in_float64() -> None:
    found, expected = drawn(sfc(5), 40_000), exact(5, 40_000)
    # Second draws begin at a radius of sqrt(2 * 15 * log 2) = 4.56. At a small one, u rounds to a
    # neighbour of 1, and its root is off by more: there as here.
    radius = np.hypot(*expected.reshape(2, -1))
    usual = np.tile((radius > 0.2) & (radius < 4), 2)
    assert usual.sum() > 39_000
    assert np.abs(found - expected)[usual].max() < 1e-6


def test_numbers_are_normal() -> None:
    check_normal(np.concatenate([drawn(sfc(i), 1 << 17) for i in range(16)]).astype(np.float64))


def scripted(word: int, more: int) -> np.random.Generator:
    """SFC64 whose first two draws are these."""
    rng = sfc(0)
    state = rng.bit_generator.state
    third = (more - 1) * NINTH % (1 << 64)
    state["state"]["state"] = np.array([word, 0, third, 0], dtype=np.uint64)
    rng.bit_generator.state = state
    assert rng.bit_generator.random_raw(2).tolist() == [word, more]
    state["state"]["state"] = np.array([word, 0, third, 0], dtype=np.uint64)
    rng.bit_generator.state = state
    return rng


QUARTERS = (0, 1 << 30, 3 << 30, (1 << 31) - 1, 1 << 31, (1 << 32) - 1)


@pytest.mark.parametrize("angle", QUARTERS)
@pytest.mark.parametrize(
    ("word", "more"),
    [
        (0, 1),
        (1, 1 << 63),
        (0, (1 << 64) - 1),
        (0x0001_FFFF, 12345),
        (0x0002_0000, 7),
        (0xFFFF_FFFF, 7),
        (0x8000_0000, 7),
    ],
)
def test_extreme_words_are_treated_as_numpy_treats_them(word: int, more: int, angle: int) -> None:
    bits = angle << 32 | word
    found = drawn(scripted(bits, more), 2)
    expected = standard_normal(scripted(bits, more), 2, FLOAT32)
    np.testing.assert_allclose(found, expected, rtol=0, atol=4e-6)
    assert np.isfinite(found).all()


def test_the_smallest_word_reaches_as_far() -> None:
    assert drawn(scripted(0, 1), 2)[0] == pytest.approx(np.sqrt(2 * 96 * np.log(2)), rel=1e-6)


def test_a_piece_is_added_to_its_parts_and_to_nothing_else() -> None:
    size, sums = 5001, {}
    for way in (box_muller, native_noise):
        buffer = np.linspace(-3, 3, 6000, dtype=np.float32)
        parts = [NoisedPart(buffer[10:110], 0, 2.0), NoisedPart(buffer[200:4001], 1200, 0.5)]
        way.add_normals(sfc(3), size, parts, 7.0)
        sums[way] = buffer
    np.testing.assert_allclose(sums[native_noise], sums[box_muller], rtol=0, atol=2e-6)
    untouched = np.r_[0:10, 110:200, 4001:6000]
    untold = np.linspace(-3, 3, 6000, dtype=np.float32)
    assert (sums[native_noise][untouched] == untold[untouched]).all()
    assert (sums[native_noise][10:110] != untold[10:110]).all()


def test_a_part_beyond_the_piece_is_refused() -> None:
    with pytest.raises(AssertionError):
        native_noise.add_normals(sfc(3), 10, [NoisedPart(np.zeros(8, np.float32), 3, 1.0)], 1.0)


def test_code_for_one_kind_of_processor_agrees(tmp_path: Path) -> None:
    command = ["cc", "-O1", "-ffp-contract=off", "-fPIC", "-shared", "-DONE_TARGET"]
    source = native_noise._SOURCE
    subprocess.run([*command, str(source), "-lm", "-o", tmp_path / "plain.so"], check=True)
    plain = ctypes.CDLL(str(tmp_path / "plain.so"))
    plain.standard_normal.argtypes = native_noise.library().standard_normal.argtypes
    state = sfc(9).bit_generator.state["state"]["state"].copy()
    out = np.empty(10_000, dtype=np.float32)
    plain.standard_normal(state.ctypes.data, out.ctypes.data, out.size)
    assert (out == drawn(sfc(9), out.size)).all()


LARGE = 1 << 19


def noise_of(size: int) -> torch.Tensor:
    sums = {"a": torch.zeros(size)}
    GaussianNoise(RandomStreams(seed=4)).add_(sums, {"a": 1.0}, step=1)
    return sums["a"]


@pytest.fixture
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_reasons", "_taken"):
        monkeypatch.setattr(routes, name, {})
    monkeypatch.setattr(notices, "_said", set())


@pytest.mark.usefixtures("forgotten")
def test_large_sums_take_c_and_small_ones_numpy() -> None:
    noise_of(LARGE - 1)
    assert routes.taken() == {"noise": ("box_muller",)}
    noise_of(LARGE)
    assert routes.taken() == {"noise": ("box_muller", "c")}


@pytest.mark.usefixtures("forgotten")
def test_the_user_may_turn_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    in_c = noise_of(LARGE)
    monkeypatch.setenv("SHUFFLED_DPSGD_C", "0")
    in_numpy = noise_of(LARGE)
    assert routes.taken() == {"noise": ("box_muller", "c")}
    torch.testing.assert_close(in_c, in_numpy, rtol=0, atol=4e-6)


@pytest.mark.usefixtures("forgotten")
def test_wrong_numbers_switch_it_off_and_are_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    fill = native_noise.fill_normal

    def off_at_one_place(rng: np.random.Generator, size: int, out: np.ndarray) -> None:
        fill(rng, size, out)
        out[size // 3] += 1e-4

    monkeypatch.setattr(native_noise, "fill_normal", off_at_one_place)
    with pytest.warns(RuntimeWarning, match="Noise in C is off: WrongResult.*numpy serves"):
        noise_of(LARGE)
    noise_of(LARGE)
    assert routes.taken() == {"noise": ("box_muller",)}
    assert list(routes.switched_off()) == ["Noise in C"]


def test_the_trial_sees_sums_that_got_no_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    library = SimpleNamespace(
        standard_normal=native_noise.library().standard_normal, add_noise=lambda *_: None
    )
    monkeypatch.setattr(native_noise, "library", lambda: library)
    with pytest.raises(routes.WrongResult, match="noise off"):
        try_c(CPU)


def test_the_trial_passes_here() -> None:
    try_c(CPU)
    assert C_ROUTE.serves(CPU)
