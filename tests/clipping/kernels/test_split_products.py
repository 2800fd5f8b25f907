"""Float32 products by float16 halves: on a GPU, else in Triton's interpreter.

The interpreter multiplies halves in full precision. What tensor cores make of them is therefore
also written out by hand.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from on_triton import DEVICE, draw
from shuffled_dpsgd.clipping.kernels import choices, float32, linear_maps, plain, split_products
from shuffled_dpsgd.clipping.kernels.triton import halves, split_gram

SHAPES = [(2, 3, 16, 64, 128), (1, 2, 37, 72, 136), (1, 2, 70, 64, 40)]


def pairs(L: int, B: int, T: int, D: int, P: int) -> list[tuple[Tensor, Tensor]]:
    """Layers whose samples differ in size by many orders of magnitude."""
    sizes = torch.logspace(-12, 6, B, device=DEVICE)[:, None, None]
    floats = torch.float32
    return [
        (draw(B, T, D, seed=n, dtype=floats), draw(B, T, P, seed=50 + n, dtype=floats) * sizes)
        for n in range(L)
    ]


@pytest.mark.parametrize("low_first", [False, True])
def test_halves_hold_22_bits_whatever_the_size_of_a_sample(low_first: bool) -> None:
    tensors = [g for _, g in pairs(2, 3, 19, 16, 70)]
    tensors[1][2, 3] *= 1e-9
    found = halves.split(tensors, low_first=low_first)
    first, second = found.stack_LB2TW.double().unbind(2)
    assert torch.equal(first[..., 70:], torch.zeros_like(first[..., 70:]))
    high = second if low_first else first
    for layer, tensor in enumerate(tensors):
        inverse = found.inverse_LB[layer].double()[:, None, None]
        both = ((first + second)[layer, ..., :70]) * inverse
        largest = tensor.double().abs().amax((1, 2), keepdim=True)
        allowed = 2.0**-22 * tensor.double().abs() + 2.0**-39 * largest
        assert ((both - tensor).abs() <= allowed).all()
        assert torch.equal(found.high()[layer], high[layer, ..., :70].half())
    scaled = high.abs().amax((2, 3))
    assert ((scaled >= 2.0**14) & (scaled <= 2.0**15)).all()


def test_scales_are_powers_of_two_and_can_be_undone() -> None:
    largest = torch.tensor([0.0, 1e-45, 1e-38, 3e-5, 1.0, 1.99, 3e38])
    scale, inverse = halves.scales(largest, halves.MAX_EXPONENT)
    assert torch.equal(scale * inverse, torch.ones(7))
    assert torch.equal(torch.frexp(scale).mantissa, torch.full((7,), 0.5))
    assert (largest * scale < 2.0**15).all()
    assert (halves.scales(largest, 40)[0] <= 2.0**40).all()
    assert halves.scales(torch.tensor([float("inf")]), 40)[1].isfinite().all()


def test_three_products_of_halves_are_nearly_a_float32_product() -> None:
    """What the kernels rely on, without them: <h, h> + <h, l> + <l, h> beside float64."""
    x, g = (torch.randn(64, 200, generator=torch.Generator().manual_seed(n)) for n in (0, 1))
    high = [(t * 2.0**12).half() for t in (x, g)]
    low = [(t * 2.0**12 - h.float()).half() for t, h in zip((x, g), high, strict=True)]
    (hx, hg), (lx, lg) = [[t.double() for t in ts] for ts in (high, low)]
    found = (hg.mT @ hx + hg.mT @ lx + lg.mT @ hx) * 2.0**-24
    exact, size = g.double().mT @ x.double(), g.double().abs().mT @ x.double().abs()
    assert ((found - exact).abs() <= 3 * 2.0**-22 * size).all()
    # TF32, which keeps the high halves alone, is a thousand times further off.
    assert (hg.mT @ hx * 2.0**-24 - exact).norm() > 1e3 * (found - exact).norm()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bias", [False, True])
def test_norms_are_right_and_never_too_small(shape: tuple[int, ...], bias: bool) -> None:
    layers = pairs(*shape)
    found = split_products.gram_sq_norms(layers, bias)
    for norms, (x, g) in zip(found, layers, strict=True):
        expected = plain.tile_sq_norms(x.double(), g.double(), bias)
        assert (norms.double() / expected - 1).abs().max() < 1e-3
        assert (norms.double() >= expected * (1 - 1e-6)).all()


def test_norms_of_tokens_that_cancel_are_not_too_small() -> None:
    x, g = draw(2, 32, 64, seed=0, dtype=torch.float32), torch.zeros(2, 32, 48, device=DEVICE)
    g[:, :16] = draw(2, 16, 48, seed=1, dtype=torch.float32)
    x[:, 16:], g[:, 16:] = x[:, :16], -g[:, :16] * (1 + 1e-5)
    expected = plain.tile_sq_norms(x.double(), g.double(), True)
    assert (split_products.gram_sq_norms([(x, g)], True)[0] >= expected * (1 - 1e-6)).all()


def test_a_vocabulary_is_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_gram, "SHARE", 64)
    x, g = pairs(1, 2, 70, 32, 301)[0]
    expected = plain.tile_sq_norms(x.double(), g.double(), False)
    found = split_products.gram_sq_norms([(x, g)], False)[0]
    assert (found.double() / expected - 1).abs().max() < 1e-3


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("accumulate", "transposed"), [(False, False), (True, True)])
def test_sums_are_those_of_float32(
    shape: tuple[int, ...], accumulate: bool, transposed: bool
) -> None:
    layers = pairs(*shape)
    factors = draw(shape[1], seed=7, dtype=torch.float32).abs()
    outs = [torch.ones(shape[4], shape[3], device=DEVICE) for _ in layers]
    if transposed:
        outs = [torch.ones(shape[3], shape[4], device=DEVICE).mT for _ in layers]
    split_products.add_outer_sums(layers, factors, outs, accumulate)
    for out, (x, g) in zip(outs, layers, strict=True):
        exact = plain.weighted_outer_sum(x.double(), g.double(), factors.double())
        error = (out - (exact + 1 if accumulate else exact)).norm() / exact.norm()
        assert error < 1e-6


# The interpreter subtracts infinities with a warning; a GPU does without.
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_a_poisoned_sample_is_seen_and_counts_nothing() -> None:
    x, g = (draw(3, 9, 32, seed=n, dtype=torch.float32) for n in (0, 1))
    clean = split_products.gram_sq_norms([(x, g)], True)[0]
    factors = torch.tensor([0.5, 0.0, 2.0], device=DEVICE)
    kept = factors != 0
    exact = plain.weighted_outer_sum(x[kept].double(), g[kept].double(), factors[kept].double())
    for poison in (float("nan"), float("inf")):
        g[1, 3, 5] = poison
        norms = split_products.gram_sq_norms([(x, g)], True)[0]
        assert norms.isfinite().tolist() == [True, False, True]
        assert torch.equal(norms[kept], clean[kept])
        out = torch.empty(32, 32, device=DEVICE)
        split_products.add_outer_sums([(x, g)], factors, [out], False)
        assert (out - exact).norm() / exact.norm() < 1e-6


def test_halves_are_made_once_for_norms_and_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    layers, made = pairs(3, 2, 16, 32, 48), []
    split = halves.split

    def counted(tensors: list[Tensor], **options: object) -> halves.Halves:
        made.append(len(tensors))
        return split(tensors, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(halves, "split", counted)
    # Two layers at a time.
    x, g = layers[0]
    monkeypatch.setattr(split_products, "PIECE_BYTES", 2 * (x.nbytes + g.nbytes))
    outs = [torch.empty(48, 32, device=DEVICE) for _ in layers]

    def settle() -> None:
        split_products.gram_sq_norms(layers, True)
        split_products.add_outer_sums(layers, torch.ones(2, device=DEVICE), outs, False, True)

    with split_products.keeping_halves():
        settle()
    assert made == [2, 2, 1, 1]
    monkeypatch.setattr(split_products, "KEPT_BYTES", 0)
    with split_products.keeping_halves():
        settle()
    assert len(made) == 12


def test_only_float32_where_tf32_is_allowed_is_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices, "may_take", lambda route, device: True)
    gpu = torch.device("cuda", 0)
    assert not choices.splits_float32(gpu)
    torch.set_float32_matmul_precision("high")
    try:
        assert choices.splits_float32(gpu)
        assert not choices.splits_float32(torch.device("cpu"))
        with float32.full_float32():
            assert choices.splits_float32(gpu)
    finally:
        torch.set_float32_matmul_precision("highest")


def test_linear_maps_go_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms and sums together: a norm leaves room for what its own sum loses."""
    monkeypatch.setattr(split_products, "serves", lambda x, g: True)
    layers = pairs(2, 2, 16, 32, 48)
    for find in (linear_maps.gram_sq_norm_sums, linear_maps.tile_sq_norm_sums):
        squares = torch.stack(find(layers, [True, True])).double()
        for row, (x, g) in zip(squares, layers, strict=True):
            expected = plain.tile_sq_norms(x.double(), g.double(), True)
            assert (row / expected - 1).abs().max() < 1e-3
    outs = [torch.empty(48, 32, device=DEVICE) for _ in layers]
    rows = [torch.empty(48, device=DEVICE) for _ in layers]
    factors = torch.tensor([0.5, 2.0], device=DEVICE)
    linear_maps.add_weighted_outer_sums(layers, factors, outs, False, rows)
    for out, row, (x, g) in zip(outs, rows, layers, strict=True):
        exact = plain.weighted_outer_sum(x.double(), g.double(), factors.double())
        assert (out - exact).norm() / exact.norm() < 1e-6
        exact = plain.weighted_row_sum(g.double(), factors.double())
        assert (row - exact).norm() / exact.norm() < 1e-5
