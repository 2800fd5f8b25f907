"""The GPU kernels against their plain definitions: on a GPU, else in Triton's interpreter.

Skipped where Triton is not installed. The interpreter multiplies no bfloat16 matrices, so without
a GPU the operands are float16.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from on_triton import DEVICE, cases, draw
from shuffled_dpsgd.clipping import ClippingEngine
from shuffled_dpsgd.clipping.kernels import choices, linear_maps, plain
from shuffled_dpsgd.clipping.kernels.triton import device_limits
from shuffled_dpsgd.clipping.kernels.triton import linear as triton_linear
from shuffled_dpsgd.clipping.kernels.triton import norms as triton_norms
from shuffled_dpsgd.clipping.kernels.triton import sums as triton_sums
from shuffled_dpsgd.clipping.kernels.triton import tiles as triton_tiles

SHAPES = [(2, 3, 16, 64, 128), (1, 2, 37, 72, 136), (2, 2, 197, 64, 64), (1, 2, 300, 64, 40)]


def layers(L: int, B: int, T: int, D: int, P: int) -> tuple[list[Tensor], list[Tensor], Tensor]:
    xs = [draw(B, T, D, seed=layer) for layer in range(L)]
    gs = [draw(B, T, P, seed=100 + layer) for layer in range(L)]
    return xs, gs, draw(B, seed=7, dtype=torch.float32).abs()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kernel", [triton_linear.gram_sq_norms, triton_tiles.tile_sq_norms])
def test_norms_are_right_and_never_too_small(
    shape: tuple[int, ...], bias: bool, kernel: Callable[..., Tensor]
) -> None:
    xs, gs, _ = layers(*shape)
    found = kernel(xs, gs, bias)
    for norms, x, g in zip(found, xs, gs, strict=True):
        expected = plain.tile_sq_norms(x.double(), g.double(), bias)
        assert ((norms - expected) / expected).abs().max() < 1e-3
        assert (norms >= expected * (1 - 1e-6)).all()


@pytest.mark.parametrize("shape", [*cases(*SHAPES, interpreted=SHAPES[1:2]), (1, 2, 70, 300, 24)])
def test_the_length_of_all_terms_and_the_bias(shape: tuple[int, ...]) -> None:
    xs, gs, _ = layers(*shape)
    reach, bias = triton_tiles.reach_and_bias(xs, gs, True)
    for layer, (x, g) in enumerate(zip(xs, gs, strict=True)):
        torch.testing.assert_close(reach[layer], plain.reach(x, g), rtol=1e-5, atol=0.0)
        squares = g.double().sum(1).square().sum(1)
        torch.testing.assert_close(bias[layer].double(), squares, rtol=1e-5, atol=0.0)
    assert int(triton_tiles.reach_and_bias(xs, gs, False)[1].count_nonzero()) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [128, 129, 191, 192, 193, 197, 208, 209, 300])
@pytest.mark.parametrize("bias", [False, True])
def test_gram_norms_of_every_kind_of_length_on_a_gpu(tokens: int, bias: bool) -> None:
    x, g = draw(3, tokens, 768, seed=0), draw(3, tokens, 328, seed=1)
    found = linear_maps.gram_sq_norms(x, g, bias)
    expected = plain.gram_sq_norms(x.double(), g.double(), bias)
    assert ((found - expected) / expected).abs().max() < 1e-2
    assert (found >= expected * (1 - 1e-6)).all()


@pytest.mark.parametrize("shape", SHAPES)
def test_weighted_sums_are_added_to_what_is_there(shape: tuple[int, ...]) -> None:
    xs, gs, factors = layers(*shape)
    factors[0] = 0.0
    gs[0][0] = float("nan")
    outs = [torch.ones(g.shape[2], x.shape[2], device=DEVICE) for x, g in zip(xs, gs, strict=True)]
    triton_sums.weighted_outer_sums(xs, gs, factors, outs)
    for x, g, out in zip(xs, gs, outs, strict=True):
        expected = 1 + plain.weighted_outer_sum(x.double(), g.double(), factors.double())
        assert (out - expected).norm() / expected.norm() < 1e-6


def test_weighted_sums_can_overwrite_what_is_there() -> None:
    xs, gs, factors = layers(2, 2, 37, 72, 136)
    outs = [torch.full((136, 72), float("nan"), device=DEVICE) for _ in xs]
    triton_sums.weighted_outer_sums(xs, gs, factors, outs, add=False)
    for x, g, out in zip(xs, gs, outs, strict=True):
        expected = plain.weighted_outer_sum(x.double(), g.double(), factors.double())
        assert (out - expected).norm() / expected.norm() < 1e-6


@pytest.mark.gpu
def test_large_stored_gradients_are_summed_and_measured_on_a_gpu() -> None:
    grads = draw(3, 300, 400, seed=0, dtype=torch.float32)
    factors = draw(3, seed=1, dtype=torch.float32).abs()
    found = plain.weighted_row_sum(grads.flatten(1).unsqueeze(1), factors)
    expected = (factors.double() @ grads.double().flatten(1)).cpu()
    assert (found.cpu() - expected).norm() / expected.norm() < 1e-6
    squares = grads.double().flatten(1).square().sum(1).cpu()
    torch.testing.assert_close(
        linear_maps.row_sq_norms(grads.flatten(1)).double().cpu(), squares, rtol=1e-6, atol=0
    )


@pytest.mark.parametrize("shape", [(2, 37, 72), (3, 5, 768), (1, 9, 4096)])
def test_norm_layers(shape: tuple[int, ...]) -> None:
    x, g = 1 + draw(*shape, seed=0, dtype=torch.float32), draw(*shape, seed=1)
    found = triton_norms.norm_sums([x, x], [g, g], 1e-5)
    expected = plain.norm_sums([x.double()], [g.double()], 1e-5)[0]
    for sums in found:
        assert (sums - expected).norm() / expected.norm() < 1e-6


def test_every_length_is_covered_and_fits_into_shared_memory() -> None:
    for tokens in range(8, 1200):
        cut = triton_sums.segmentation(tokens)
        segment = cut["FULL"] * cut["CHUNK"] + cut["TAIL"]
        assert cut["segments"] * segment >= tokens
        stages = 3 if segment <= 128 else 2
        assert stages * segment * 2 * triton_sums.BLOCK * 2 <= 227 * 1024


def test_stages_are_those_that_fit_into_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    for kibibytes, expected in ((227, 3), (163, 2), (99, 1), (48, 1)):
        monkeypatch.setattr(device_limits, "shared_bytes", lambda _, size=kibibytes: size << 10)
        assert device_limits.stages_that_fit(3, 64 << 10, cpu) == expected


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [24, 128, 197, 240, 256, 320])
def test_sums_of_every_kind_of_length_on_a_gpu(tokens: int) -> None:
    x, g = draw(3, tokens, 96, seed=0), draw(3, tokens, 160, seed=1)
    factors = draw(3, seed=2, dtype=torch.float32).abs()
    found = torch.empty(160, 96, device=x.device)
    linear_maps.add_weighted_outer_sums([(x, g)], factors, [found], accumulate=False)
    expected = plain.weighted_outer_sum(x.double(), g.double(), factors.double())
    assert (found - expected).norm() / expected.norm() < 1e-6


@pytest.mark.gpu
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tokens", [24, 64, 70, 100, 128, 130, 197, 208, 209, 256, 320, 1000, 1500])
def test_sums_with_loading_and_multiplying_kept_apart(
    tokens: int, bias: bool, transposed: bool
) -> None:
    if not choices.is_hopper(torch.device(DEVICE)):
        pytest.skip("written for another device")
    parted = choices.module("gluon.weighted_sums")
    xs = [draw(9, tokens, 328, seed=layer)[..., :200] for layer in range(2)]
    gs = [draw(9, tokens, 136, seed=10 + layer) for layer in range(2)]
    factors = draw(9, seed=2, dtype=torch.float32).abs()
    factors[1] = 0.0
    xs[0][1] = float("nan")
    gs[1][1, 2, 3] = float("inf")
    for add in (True, False):
        held = 1.0 if add else 0.0
        shape = (200, 136) if transposed else (136, 200)
        outs = [torch.ones(shape, device=DEVICE) for _ in xs]
        outs = [out.mT for out in outs] if transposed else outs
        biases = [torch.ones(136, device=DEVICE) for _ in xs] if bias else []
        parted.weighted_outer_sums(xs, gs, factors, outs, add, biases)
        for x, g, out in zip(xs, gs, outs, strict=True):
            wide = (x.double(), g.double(), factors.double())
            expected = plain.weighted_outer_sum(*wide) + held
            assert (out - expected).norm() / expected.norm() < 2e-6
        for g, found in zip(gs, biases, strict=False):
            expected = plain.weighted_row_sum(g.double(), factors.double()) + held
            assert (found - expected).norm() / expected.norm() < 1e-6


@pytest.mark.gpu
@pytest.mark.parametrize("accumulate", [False, True])
def test_sums_go_where_kernels_cannot_write_them(accumulate: bool) -> None:
    x, g = draw(3, 40, 64, seed=0), draw(3, 40, 48, seed=1)
    factors = torch.rand(3, device=DEVICE)
    room, bias = torch.ones(48 * 64 + 1, device=DEVICE), torch.ones(48, device=DEVICE)
    odd = room[1:].view(48, 64)
    linear_maps.add_weighted_outer_sums([(x, g)], factors, [odd], accumulate, [bias])
    held = 1.0 if accumulate else 0.0
    wide = (x.double(), g.double(), factors.double())
    expected = plain.weighted_outer_sum(*wide) + held
    assert (odd - expected).norm() / expected.norm() < 1e-6
    expected = plain.weighted_row_sum(*wide[1:]) + held
    assert (bias - expected).norm() / expected.norm() < 1e-6


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [100, 128, 129, 200, 256, 300])
def test_a_vocabulary_s_norms_on_a_gpu(tokens: int, dtype: torch.dtype) -> None:
    x = draw(4, tokens, 64, seed=0, dtype=dtype)
    wide = draw(4, tokens, 30_080, seed=1, dtype=dtype)
    g = wide[..., :30_001]
    found = linear_maps.gram_sq_norms(x, g, True)
    expected = plain.tile_sq_norms(x.double(), g.double(), True)
    assert ((found - expected) / expected).abs().max() < 1e-2
    assert (found >= expected * (1 - 1e-6)).all()


@pytest.mark.gpu
def test_long_tables_tied_to_a_head_on_a_gpu() -> None:
    B, T, D, V = 3, 300, 64, 500
    ids = torch.randint(V, (B, T), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    x, gl = draw(B, T, D, seed=0), draw(B, T, V, seed=1)
    ge = draw(B, T, D, seed=2, dtype=torch.float32)
    found = plain.embedding_sq_norms(ids, ge, None)
    expected = plain.embedding_sq_norms(ids, ge.double(), None)
    assert ((found - expected) / expected).abs().max() < 1e-5
    assert (found >= expected * (1 - 1e-6)).all()
    cross = plain.tied_cross_terms(x, gl, ids, ge, None)
    expected = plain.tied_cross_terms(x.double(), gl.double(), ids, ge.double(), None)
    assert (cross >= expected).all()
    assert (cross - expected).max() < 1e-5 * x.norm() * gl.norm() * ge.norm()


@pytest.mark.gpu
def test_one_sample_contributes_at_most_the_clip_norm_under_bfloat16() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 128), torch.nn.LayerNorm(128), torch.nn.Linear(128, 5003)
    ).cuda()
    x = torch.randn(1, 48, 64, device="cuda")
    engine = ClippingEngine(model, clip_norm=1e-3)
    with engine:
        with torch.autocast("cuda", torch.bfloat16):
            losses = model(x).float().square().sum((1, 2))
        engine.backward(losses)
    total = torch.stack([s.double().square().sum() for s in engine.clipped_sum().values()])
    assert 0.99e-3 < float(total.sum().sqrt()) <= 1e-3 * (1 + 1e-6)


@pytest.mark.gpu
def test_kernels_agree_with_plain_torch_in_a_whole_step(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    model = torch.nn.Sequential(layer, torch.nn.Linear(64, 4099)).cuda()
    x = torch.randn(6, 40, 64, device="cuda")
    found = []
    for available in (True, False):
        monkeypatch.setattr(choices, "triton_available", lambda available=available: available)
        engine = ClippingEngine(model, clip_norm=0.5)
        with engine:
            with torch.autocast("cuda", torch.bfloat16):
                losses = model(x).float().square().mean((1, 2))
            engine.backward(losses)
        found.append(engine.clipped_sum())
    for name, total in found[0].items():
        torch.testing.assert_close(total, found[1][name], rtol=1e-3, atol=1e-6)
