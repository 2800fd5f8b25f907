"""The primitives on a CPU, against sums in float64 and where rounding is worst."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shuffled_dpsgd.clipping.kernels import linear_maps, plain


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def gram_sq_norms(x: Tensor, g: Tensor, bias: bool) -> Tensor:
    return linear_maps.gram_sq_norms(x, g, bias)


def exact_sq_norms(x: Tensor, g: Tensor, bias: bool) -> Tensor:
    squares = torch.einsum("btp,btd->bpd", g.double(), x.double()).square().sum((1, 2))
    return squares + g.double().sum(1).square().sum(1) if bias else squares


@settings(max_examples=60, deadline=None)
@given(
    batch=st.integers(1, 4),
    tokens=st.integers(1, 40),
    widths=st.tuples(st.integers(1, 70), st.integers(1, 70)),
    bias=st.booleans(),
    exponent=st.integers(-12, 6),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 2**31),
)
def test_gram_norms_are_exact_and_not_too_small(
    batch: int,
    tokens: int,
    widths: tuple[int, int],
    bias: bool,
    exponent: int,
    dtype: torch.dtype,
    seed: int,
) -> None:
    x = 10.0**exponent * draw(batch, tokens, widths[0], seed=seed)
    g = draw(batch, tokens, widths[1], seed=seed + 1, dtype=dtype)
    x = x.to(dtype)
    found, expected = gram_sq_norms(x, g, bias), exact_sq_norms(x, g, bias)
    assert found.dtype == torch.float32
    lengths = (x.double().square().sum(2) + bias).sqrt() * g.double().norm(dim=2)
    assert (found.double() >= expected * (1 - 1e-6)).all()
    assert (found.double().sqrt() <= expected.sqrt() * (1 + 1e-6) + 1e-6 * lengths.sum(1)).all()


@pytest.mark.parametrize("spread", [1e-1, 1e-3, 1e-5, 1e-7, 0.0])
@pytest.mark.parametrize("swap", [False, True])
def test_cancelling_tokens_are_not_found_too_small(spread: float, swap: bool) -> None:
    """The tokens' inputs are nearly one vector and their gradients nearly add up to nothing."""
    x = draw(1, 1, 128, seed=0) + spread * draw(2, 64, 128, seed=1)
    g = draw(2, 32, 256, seed=2).repeat_interleave(2, 1)
    g[:, 1::2] *= -1
    if swap:
        x, g = g, x
    found, expected = gram_sq_norms(x, g, False), exact_sq_norms(x, g, False)
    rounding = 2e-6 * plain.reach(x, g)
    assert (found.double() >= expected * (1 - 1e-6)).all()
    assert (found.double().sqrt() <= expected.sqrt() * (1 + 1e-5) + rounding).all()


@pytest.mark.parametrize("bias", [False, True])
def test_zero_and_repeated_tokens_have_a_factor(bias: bool) -> None:
    x, g = draw(3, 12, 16, seed=3), draw(3, 12, 24, seed=4)
    x[0], x[1, 4:] = 0.0, 0.0
    x[2] = x[2, :1]
    expected = exact_sq_norms(x, g, bias)
    torch.testing.assert_close(gram_sq_norms(x, g, bias).double(), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("token", [0, 5, 11])
@pytest.mark.parametrize("side", ["x", "g"])
def test_non_finite_samples_have_non_finite_norms(poison: float, token: int, side: str) -> None:
    x, g = draw(3, 12, 16, seed=5), draw(3, 12, 24, seed=6)
    clean = gram_sq_norms(x, g, True)
    (x if side == "x" else g)[1, token, 3] = poison
    found = gram_sq_norms(x, g, True)
    assert not torch.isfinite(found[1])
    torch.testing.assert_close(found[[0, 2]], clean[[0, 2]])


@pytest.mark.parametrize("find", [linear_maps.gram_sq_norm_sums, linear_maps.tile_sq_norm_sums])
@pytest.mark.parametrize("poison", [0.0, float("nan"), float("inf")])
@pytest.mark.parametrize("most", [1, 400, plain.SMALL_ELEMENTS])
def test_norms_of_layers_computed_together_are_those_of_each(
    find: Callable[..., list[Tensor]], poison: float, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers of one shape in one batch, some of them with one input, and one with a bad sample."""
    monkeypatch.setattr(plain, "SMALL_ELEMENTS", most)
    inputs = [draw(3, 6, 16, seed=seed) for seed in range(3)]
    pairs = [
        (x, draw(3, 6, 8, seed=10 + i)) for i, x in enumerate([*inputs, *inputs[:1], inputs[0]])
    ]
    biases = [True, True, False, True, False]
    pairs[1][1][2, 4, 0] += poison
    found = torch.stack(find(pairs, biases)).sum(0).double()
    each = [exact_sq_norms(x, g, bias) for (x, g), bias in zip(pairs, biases, strict=True)]
    expected = torch.stack(each).sum(0)
    assert bool(torch.isfinite(found[2])) == (poison == 0.0)
    good = [0, 1, 2] if poison == 0.0 else [0, 1]
    torch.testing.assert_close(found[good], expected[good], rtol=1e-5, atol=0)


@pytest.mark.parametrize("most", [1, 200, plain.SMALL_ELEMENTS])
def test_gradients_of_norm_layers_computed_together(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plain, "SMALL_ELEMENTS", most)
    xs, gs = ([draw(2, 5, 7, seed=base + i) for i in range(4)] for base in (20, 30))
    for x, g, found in zip(xs, gs, plain.norm_sums(xs, gs, 1e-5), strict=True):
        of_weight = g * torch.nn.functional.layer_norm(x, (7,))
        torch.testing.assert_close(found, torch.stack([of_weight.sum(1), g.sum(1)], 1))


@pytest.mark.parametrize("length", [1, 2048, 3 * 2048 + 7, 1 << 20])
def test_long_rows_keep_their_length(length: int) -> None:
    rows = 1.0 + 1e-3 * draw(2, length, seed=9)
    expected = rows.double().square().sum(1)
    found = linear_maps.row_sq_norms(rows).double()
    torch.testing.assert_close(found, expected, rtol=5e-7, atol=0)


def test_long_sums_of_equal_rows_do_not_drift() -> None:
    g, out = torch.full((2, 4096, 3), 0.1), torch.zeros(3)
    plain.weighted_row_sum(g, torch.tensor([1.0, 0.5]), out)
    expected = torch.full((3,), 1.5 * 4096) * g[0, 0].double()
    torch.testing.assert_close(out.double(), expected, rtol=5e-7, atol=0)


def test_factors_on_either_operand_give_the_same_sum() -> None:
    x, g, factors = draw(3, 5, 8, seed=10), draw(3, 5, 4, seed=11), torch.tensor([1.0, 0.3, 0.1])
    for one, other in ((x, g), (g, x)):
        out = torch.ones(other.shape[2], one.shape[2])
        plain.weighted_outer_sum(one, other, factors, out)
        expected = torch.einsum("b,btp,btd->pd", factors, other, one) + 1
        torch.testing.assert_close(out, expected)
        out.fill_(float("nan"))
        plain.weighted_outer_sum(one, other, factors, out, accumulate=False)
        torch.testing.assert_close(out, expected - 1)


def test_overwriting_sums_leave_samples_of_factor_zero_out() -> None:
    x, g, out = draw(2, 5, 8, seed=14), draw(2, 5, 4, seed=15), torch.full((4, 8), float("nan"))
    x[1], g[1] = float("inf"), float("nan")
    plain.weighted_outer_sum(x, g, torch.tensor([0.5, 0.0]), out, accumulate=False)
    torch.testing.assert_close(out, 0.5 * g[0].mT @ x[0])
