"""Float32 products on tensor cores: on a GPU, else in Triton's interpreter.

The interpreter multiplies float32 as it is. What three products of TF32 make of it is therefore
also written out by hand.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from on_triton import DEVICE, draw
from shuffled_dpsgd.clipping.kernels import choices, float32, linear_maps, plain
from shuffled_dpsgd.clipping.kernels.triton import linear, sums, tiles

SHAPES = [(2, 3, 16, 64, 128), (1, 2, 37, 72, 136), (1, 2, 70, 64, 40)]


def pairs(L: int, B: int, T: int, D: int, P: int) -> tuple[list[Tensor], list[Tensor]]:
    """Layers whose samples differ in size by many orders of magnitude."""
    sizes = torch.logspace(-12, 6, B, device=DEVICE)[:, None, None]
    xs = [draw(B, T, D, seed=n, dtype=torch.float32) for n in range(L)]
    return xs, [draw(B, T, P, seed=50 + n, dtype=torch.float32) * sizes for n in range(L)]


def tf32(tensor: Tensor) -> Tensor:
    """Rounded to TF32's eleven bits."""
    return ((tensor.view(torch.int32) + 0x1000) & -0x2000).view(torch.float32)


def test_three_products_of_tf32_are_nearly_a_float32_product() -> None:
    """What the kernels rely on, without them: <h, h> + <h, l> + <l, h> beside float64."""
    x, g = (torch.randn(64, 200, generator=torch.Generator().manual_seed(n)) for n in (0, 1))
    high = [tf32(t) for t in (x, g)]
    (hx, lx), (hg, lg) = [
        (h.double(), tf32(t - h).double()) for h, t in zip(high, (x, g), strict=True)
    ]
    found = hg.mT @ hx + hg.mT @ lx + lg.mT @ hx
    exact, size = g.double().mT @ x.double(), g.double().abs().mT @ x.double().abs()
    assert ((found - exact).abs() <= 8 * 2.0**-23 * size).all()
    # TF32 alone is a thousand times further off.
    assert (hg.mT @ hx - exact).norm() > 1e3 * (found - exact).norm()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bias", [False, True])
def test_norms_are_right_and_never_too_small(shape: tuple[int, ...], bias: bool) -> None:
    xs, gs = pairs(*shape)
    for kernel in (linear.gram_sq_norms, tiles.tile_sq_norms):
        for norms, x, g in zip(kernel(xs, gs, bias), xs, gs, strict=True):
            expected = plain.tile_sq_norms(x.double(), g.double(), bias)
            assert (norms.double() / expected - 1).abs().max() < 1e-3
            assert (norms.double() >= expected * (1 - 1e-6)).all()


def test_norms_of_tokens_that_cancel_are_not_too_small() -> None:
    x, g = draw(2, 32, 64, seed=0, dtype=torch.float32), torch.zeros(2, 32, 48, device=DEVICE)
    g[:, :16] = draw(2, 16, 48, seed=1, dtype=torch.float32)
    x[:, 16:], g[:, 16:] = x[:, :16], -g[:, :16] * (1 + 1e-5)
    expected = plain.tile_sq_norms(x.double(), g.double(), True)
    assert (linear.gram_sq_norms([x], [g], True)[0] >= expected * (1 - 1e-6)).all()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("accumulate", [False, True])
def test_sums_are_those_of_float32(shape: tuple[int, ...], accumulate: bool) -> None:
    xs, gs = pairs(*shape)
    factors = draw(shape[1], seed=7, dtype=torch.float32).abs()
    outs = [torch.ones(shape[4], shape[3], device=DEVICE) for _ in xs]
    sums.weighted_outer_sums(xs, gs, factors, outs, accumulate)
    for out, x, g in zip(outs, xs, gs, strict=True):
        exact = plain.weighted_outer_sum(x.double(), g.double(), factors.double())
        error = (out - (exact + 1 if accumulate else exact)).norm() / exact.norm()
        assert error < 2e-6


# The interpreter multiplies infinities with a warning; a GPU does without.
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_a_poisoned_sample_is_seen_and_counts_nothing() -> None:
    x, g = (draw(3, 9, 32, seed=n, dtype=torch.float32) for n in (0, 1))
    clean = linear.gram_sq_norms([x], [g], True)[0]
    factors = torch.tensor([0.5, 0.0, 2.0], device=DEVICE)
    kept = factors != 0
    exact = plain.weighted_outer_sum(x[kept].double(), g[kept].double(), factors[kept].double())
    for poison in (float("nan"), float("inf")):
        g[1, 3, 5] = poison
        norms = linear.gram_sq_norms([x], [g], True)[0]
        assert norms.isfinite().tolist() == [True, False, True]
        assert torch.equal(norms[kept], clean[kept])
        out = torch.empty(32, 32, device=DEVICE)
        sums.weighted_outer_sums([x], [g], factors, [out], False)
        assert (out - exact).norm() / exact.norm() < 2e-6


def test_float32_goes_to_tensor_cores_only_where_tf32_is_allowed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(choices, "may_take", lambda backend, device: True)
    gpu = torch.device("cuda", 0)
    assert choices.multiplies(torch.float16, gpu)
    assert not choices.multiplies(torch.float32, gpu)
    torch.set_float32_matmul_precision("high")
    try:
        assert choices.multiplies(torch.float32, gpu)
        assert not choices.multiplies(torch.float64, gpu)
        assert not choices.multiplies(torch.float32, torch.device("cpu"))
        with float32.full_float32():
            assert choices.multiplies(torch.float32, gpu)
    finally:
        torch.set_float32_matmul_precision("highest")


def test_linear_maps_go_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms and sums together: a norm leaves room for what its own sum loses."""
    monkeypatch.setattr(choices, "multiplies", lambda dtype, device: True)
    monkeypatch.setattr(choices, "may_take", lambda backend, device: True)
    xs, gs = pairs(2, 2, 16, 32, 45)
    layers = list(zip(xs, gs, strict=True))
    for find in (linear_maps.gram_sq_norm_sums, linear_maps.tile_sq_norm_sums):
        squares = torch.stack(find(layers, [True, True])).sum(0).double()
        exact = [plain.tile_sq_norms(x.double(), g.double(), True) for x, g in layers]
        assert (squares / sum(exact) - 1).abs().max() < 1e-3
    outs = [torch.empty(45, 32, device=DEVICE), torch.empty(32, 45, device=DEVICE).mT]
    rows = [torch.empty(45, device=DEVICE) for _ in layers]
    factors = torch.tensor([0.5, 2.0], device=DEVICE)
    linear_maps.add_weighted_outer_sums(layers, factors, outs, False, rows)
    for out, row, (x, g) in zip(outs, rows, layers, strict=True):
        total = plain.weighted_outer_sum(x.double(), g.double(), factors.double())
        assert (out - total).norm() / total.norm() < 2e-6
        total = plain.weighted_row_sum(g.double(), factors.double())
        assert (row - total).norm() / total.norm() < 1e-5
