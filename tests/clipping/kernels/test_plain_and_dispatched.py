"""The numeric primitives against sums written out in float64, one sample at a time."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shuffled_dpsgd.clipping.kernels import linear_maps, plain

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-5}
SHAPES = st.tuples(*(st.integers(1, 9) for _ in range(4)))
DTYPES = st.sampled_from(list(TOLERANCE))


def draw(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def assert_close(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert found.dtype == wide
    scale = expected.norm().clamp(min=1e-30)
    assert (found.double() - expected).norm() / scale <= TOLERANCE[dtype]


def outer(x: Tensor, g: Tensor) -> Tensor:
    """Each sample's weight gradient, (B, P, D), in float64."""
    return torch.einsum("btp,btd->bpd", g.double(), x.double())


def weighted_outer_sum(x: Tensor, g: Tensor, factors: Tensor, out: Tensor | None = None) -> Tensor:
    if out is None:
        wide = plain.accumulator_dtype(x, g)
        out = torch.full((g.shape[2], x.shape[2]), float("nan"), dtype=wide)
        linear_maps.add_weighted_outer_sums([(x, g)], factors, [out], accumulate=False)
    else:
        linear_maps.add_weighted_outer_sums([(x, g)], factors, [out])
    return out


def table_gradients(ids: Tensor, g: Tensor, rows: int, padding_idx: int | None) -> Tensor:
    """Each sample's embedding gradient, (B, V, D), in float64."""
    out = torch.zeros(ids.shape[0], rows, g.shape[-1], dtype=torch.float64)
    for b in range(ids.shape[0]):
        for t in range(ids.shape[1]):
            if int(ids[b, t]) != padding_idx:
                out[b, int(ids[b, t])] += g[b, t].double()
    return out


@pytest.mark.parametrize("sq_norms", [linear_maps.gram_sq_norms, linear_maps.tile_sq_norms])
@pytest.mark.parametrize("bias", [False, True])
@settings(max_examples=20, deadline=None)
@given(shape=SHAPES, dtype=DTYPES)
def test_linear_norms(
    sq_norms: Callable[..., Tensor],
    bias: bool,
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
) -> None:
    B, T, D, P = shape
    x, g = draw(B, T, D, dtype=dtype), draw(B, T, P, dtype=dtype, seed=1)
    expected = outer(x, g).square().sum((1, 2))
    if bias:
        expected = expected + g.double().sum(1).square().sum(1)
    # Gram matrices cancel where the tokens of a sample do: compare on the scale of their sizes.
    size = x.double().norm() * g.double().norm()
    found = sq_norms(x, g, bias)
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert (found.double() - expected).abs().max() <= TOLERANCE[dtype] * size.square()


@pytest.mark.parametrize("features", [7, 16, 19, 35])
@pytest.mark.parametrize("samples", [0, 3])
def test_products_of_very_wide_tokens_are_taken_in_shares(
    features: int, samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plain, "SHARE", 8)
    monkeypatch.setattr(plain, "MAX_TEMPORARY_ELEMENTS", 100)
    a, b = (draw(samples, length, features, dtype=torch.float64) for length in (5, 4))
    widths: list[int] = []

    def multiply(left: Tensor, right: Tensor) -> Tensor:
        widths.append(left.shape[2])
        return left @ right.mT

    for other in (b, a):
        found = plain.products_in_shares(a, other, multiply)
        torch.testing.assert_close(found, a @ other.mT)
    assert max(widths, default=0) < 16
    assert plain.stretch(7) == 7
    assert max(widths, default=0) <= plain.stretch(features)


@settings(max_examples=20, deadline=None)
@given(shape=SHAPES, dtype=DTYPES, padding_idx=st.sampled_from([None, 0, 2]))
def test_embedding_norms_and_sums(
    shape: tuple[int, int, int, int], dtype: torch.dtype, padding_idx: int | None
) -> None:
    B, T, D, rows = shape
    rows += 2
    ids = torch.randint(rows, (B, T), generator=torch.Generator().manual_seed(2))
    g, factors = draw(B, T, D, dtype=dtype), draw(B, seed=3).abs()
    gradients = table_gradients(ids, g, rows, padding_idx)
    norms = plain.embedding_sq_norms(ids, g, padding_idx)
    assert_close(norms, gradients.square().sum((1, 2)), dtype)
    out = torch.ones(rows, D, dtype=norms.dtype)
    plain.weighted_embedding_sum(ids, g, factors, padding_idx, out)
    assert_close(out, 1 + torch.einsum("b,bvd->vd", factors, gradients), dtype)


@settings(max_examples=20, deadline=None)
@given(shape=SHAPES, dtype=DTYPES, padding_idx=st.sampled_from([None, 1]))
def test_tied_cross_terms(
    shape: tuple[int, int, int, int], dtype: torch.dtype, padding_idx: int | None
) -> None:
    B, T, D, rows = shape
    rows += 1
    ids = torch.randint(rows, (B, T), generator=torch.Generator().manual_seed(2))
    x, g_embedding = draw(B, T, D, dtype=dtype), draw(B, T, D, dtype=dtype, seed=4)
    g_logits = draw(B, T, rows, dtype=dtype, seed=5)
    expected = (outer(x, g_logits) * table_gradients(ids, g_embedding, rows, padding_idx)).sum(
        (1, 2)
    )
    found = plain.tied_cross_terms(x, g_logits, ids, g_embedding, padding_idx)
    size = x.double().norm() * g_logits.double().norm() * g_embedding.double().norm()
    assert (found.double() - expected).abs().max() <= TOLERANCE[dtype] * size
    stored = plain.stored_cross_terms(outer(x, g_logits), ids, g_embedding, padding_idx)
    torch.testing.assert_close(stored, expected)


@pytest.mark.parametrize("padding_idx", [None, 1])
@pytest.mark.parametrize("rows", [1, 3, 50])
def test_tables_and_those_tied_to_a_head(
    rows: int, padding_idx: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plain, "MAX_TEMPORARY_ELEMENTS", 300)
    B, T, D = 3, 21, 6
    ids = torch.randint(max(rows, 2), (B, T), generator=torch.Generator().manual_seed(2)) % rows
    x, ge = draw(B, T, D, dtype=torch.bfloat16), draw(B, T, D, dtype=torch.float32, seed=4)
    gl = draw(B, T, rows, dtype=torch.bfloat16, seed=5)
    gradients = table_gradients(ids, ge, rows, padding_idx)
    norms = plain.embedding_sq_norms(ids, ge, padding_idx)
    expected = gradients.square().sum((1, 2))
    torch.testing.assert_close(norms.double(), expected, rtol=1e-5, atol=1e-12)
    assert (norms >= expected * (1 - 1e-7)).all()
    found = plain.tied_cross_terms(x, gl, ids, ge, padding_idx).double()
    expected = (outer(x, gl) * gradients).sum((1, 2))
    size = x.double().norm() * gl.double().norm() * ge.double().norm()
    assert (found - expected).abs().max() <= 1e-6 * size


def test_a_poisoned_table_spoils_no_other_sample() -> None:
    ids, g = torch.zeros(3, 4, dtype=torch.int64), draw(3, 4, 5, dtype=torch.float32)
    clean = plain.embedding_sq_norms(ids, g, None)
    g[1, 2, 3] = float("nan")
    found = plain.embedding_sq_norms(ids, g, None)
    assert found.isnan().tolist() == [False, True, False]
    assert torch.equal(found[[0, 2]], clean[[0, 2]])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("accumulate", [True, False])
def test_weights_stored_either_way_are_summed_with_their_biases(
    accumulate: bool, dtype: torch.dtype
) -> None:
    xs = [draw(2, 3, 5, dtype=dtype, seed=seed) for seed in range(3)]
    gs = [draw(2, 3, 4, dtype=dtype, seed=10 + seed) for seed in range(3)]
    factors = draw(2, seed=2)
    held = 1.0 if accumulate else float("nan")
    outs = [torch.full((4, 5), held).to(dtype), torch.full((5, 4), held).to(dtype).mT]
    outs.append(torch.full((5, 4), held).to(dtype).mT)
    biases = [torch.full((4,), held).to(dtype), None, torch.full((4,), held).to(dtype)]
    pairs = list(zip(xs, gs, strict=True))
    linear_maps.add_weighted_outer_sums(pairs, factors.to(dtype), outs, accumulate, biases)
    for x, g, out, bias in zip(xs, gs, outs, biases, strict=True):
        added = 1.0 if accumulate else 0.0
        assert_close(out, added + torch.einsum("b,bpd->pd", factors, outer(x, g)), dtype)
        if bias is not None:
            assert_close(bias, added + torch.einsum("b,btp->p", factors, g.double()), dtype)


@settings(max_examples=20, deadline=None)
@given(shape=SHAPES, dtype=DTYPES)
def test_weighted_sums(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    B, T, D, P = shape
    x, g, factors = draw(B, T, D, dtype=dtype), draw(B, T, P, dtype=dtype, seed=1), draw(B, seed=2)
    expected = torch.einsum("b,bpd->pd", factors, outer(x, g))
    found = weighted_outer_sum(x, g, factors)
    assert_close(found, expected, dtype)
    weighted_outer_sum(x, g, factors, found)
    assert_close(found, 2 * expected, dtype)
    rows = plain.weighted_row_sum(g, factors)
    assert_close(rows, torch.einsum("b,btp->p", factors, g.double()), dtype)
    plain.weighted_row_sum(g, factors, rows)
    assert_close(rows, 2 * torch.einsum("b,btp->p", factors, g.double()), dtype)


def test_weighted_sums_can_overwrite_what_is_there() -> None:
    x, g, factors = draw(2, 3, 5), draw(2, 3, 4, seed=1), draw(2, seed=2)
    out, row = torch.full((4, 5), float("nan")).double(), torch.full((4,), float("nan")).double()
    linear_maps.add_weighted_outer_sums([(x, g)], factors, [out], accumulate=False)
    plain.add_weighted_row_sums([g], factors, [row], accumulate=False)
    torch.testing.assert_close(out, torch.einsum("b,bpd->pd", factors, outer(x, g)))
    torch.testing.assert_close(row, torch.einsum("b,btp->p", factors, g))


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_sample_of_factor_zero_contributes_nothing(poison: float) -> None:
    x, g, factors = draw(3, 4, 5), draw(3, 4, 6, seed=1), torch.tensor([1.0, 0.0, 0.5])
    keep = [0, 2]
    ids = torch.arange(4).repeat(3, 1)
    x[1], g[1] = poison, poison
    expected = weighted_outer_sum(x[keep], g[keep], factors[keep])
    torch.testing.assert_close(weighted_outer_sum(x, g, factors), expected)
    expected = plain.weighted_row_sum(g[keep], factors[keep])
    torch.testing.assert_close(plain.weighted_row_sum(g, factors), expected)
    found, expected = torch.zeros(4, 6).double(), torch.zeros(4, 6).double()
    plain.weighted_embedding_sum(ids, g, factors, None, found)
    plain.weighted_embedding_sum(ids[keep], g[keep], factors[keep], None, expected)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("affine", [True, False])
def test_layer_norm_backward_agrees_with_autograd(dtype: torch.dtype, affine: bool) -> None:
    B, T, D = 3, 4, 6
    x, g = draw(B, T, D, dtype=dtype).requires_grad_(), draw(B, T, D, dtype=dtype, seed=1)
    weight = draw(D, dtype=dtype, seed=2).requires_grad_() if affine else None
    _, mean, rstd = torch.native_layer_norm(x, [D], weight, None, 1e-5)
    grad_x, gw, gb = plain.layer_norm_backward(x.detach(), g, weight, mean, rstd)
    out = torch.nn.functional.layer_norm(x, [D], weight, None, 1e-5)
    torch.testing.assert_close(grad_x, torch.autograd.grad(out, x, g)[0])
    torch.testing.assert_close(gb, g.sum(1))
    for b in range(B if weight is not None else 0):
        out = torch.nn.functional.layer_norm(x[b], [D], weight, None, 1e-5)
        torch.testing.assert_close(gw[b], torch.autograd.grad(out, weight, g[b])[0])
    assert plain.layer_norm_backward(x.detach(), g, weight, mean, rstd, False)[0] is None


def test_quadratic_temporaries_are_cut_without_changing_the_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x, g, ids = draw(2, 7, 3), draw(2, 7, 5, seed=1), torch.arange(14).reshape(2, 7) % 4
    whole = [
        plain.gram_sq_norms(x, g, True),
        plain.tile_sq_norms(x, g, True),
        plain.embedding_sq_norms(ids, x, 1),
        plain.tied_cross_terms(x, g, ids, x, 1),
    ]
    monkeypatch.setattr(plain, "MAX_TEMPORARY_ELEMENTS", 30)
    cut = [
        plain.gram_sq_norms(x, g, True),
        plain.tile_sq_norms(x, g, True),
        plain.embedding_sq_norms(ids, x, 1),
        plain.tied_cross_terms(x, g, ids, x, 1),
    ]
    for a, b in zip(whole, cut, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("tokens", [0, 3])
def test_empty_batches_give_zeros(tokens: int) -> None:
    x, g, factors = torch.zeros(0, tokens, 4), torch.zeros(0, tokens, 5), torch.zeros(0)
    assert linear_maps.gram_sq_norms(x, g, True).shape == (0,)
    assert linear_maps.tile_sq_norms(x, g, True).shape == (0,)
    assert torch.equal(weighted_outer_sum(x, g, factors), torch.zeros(5, 4))
    assert torch.equal(plain.weighted_row_sum(g, factors), torch.zeros(5))
