"""Trials of the GPU kernels: a small problem each, compared with `plain` in float64 on the CPU.

A trial raises if its kernels do not compile, do not run, or compute something else. Norms must also
not be smaller than those of what is summed: a norm that is too small lets a sample exceed the clip
norm. Sums are tried with one sample of NaN gradients and a factor of zero, which must count
nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shuffled_dpsgd.clipping.kernels import plain
from shuffled_dpsgd.runtime.backends import expect, expect_close

SAMPLES = 3
# What a norm may fall short of the exact one, by rounding alone.
SHORT = 1e-6


def _draw(device: torch.device, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    """Standard normal numbers that leave the caller's generators alone."""
    generator = torch.Generator("cpu").manual_seed(sum(shape))
    numbers = torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32)
    return numbers.to(device, _half(device) if dtype is None else dtype)


def _half(device: torch.device) -> torch.dtype:
    """Triton's interpreter, the only way to run these on a CPU, multiplies no bfloat16."""
    return torch.bfloat16 if device.type == "cuda" else torch.float16


def _wide(tensor: Tensor) -> Tensor:
    return tensor.cpu().double()


def _expect_norms(found: Tensor, exact: Tensor, rtol: float) -> None:
    expect_close(found, exact, rtol=rtol, what="norms")
    are_long = bool((found.cpu().double() >= exact * (1 - SHORT)).all())
    expect(are_long, "norms smaller than they are")


def _poisoned(device: torch.device, g: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients and factors, of which the last sample's are NaN and zero."""
    factors = _draw(device, SAMPLES, dtype=torch.float32).abs()
    factors[-1] = 0.0
    poisoned = g.clone()
    poisoned[-1] = float("nan")
    return poisoned, factors


def try_kernels(device: torch.device) -> None:
    """`triton.linear`, `triton.tiles`, `triton.sums` and `triton.norms`."""
    from shuffled_dpsgd.clipping.kernels.triton import linear, norms, tiles

    x, g = _draw(device, SAMPLES, 37, 80), _draw(device, SAMPLES, 37, 144)
    exact = plain.tile_sq_norms(_wide(x), _wide(g), True)
    _expect_norms(linear.gram_sq_norms([x], [g], True)[0], exact, 1e-2)
    x, g = _draw(device, SAMPLES, 70, 72), _draw(device, SAMPLES, 70, 136)
    exact = plain.tile_sq_norms(_wide(x), _wide(g), True)
    _expect_norms(tiles.tile_sq_norms([x], [g], True)[0], exact, 1e-3)
    _try_sums(x, g, 1e-5)
    x = 1 + _draw(device, SAMPLES, 37, 72, dtype=torch.float32)
    g = _draw(device, SAMPLES, 37, 72)
    found = norms.norm_sums([x], [g], 1e-5)
    expect_close(found, plain.norm_sums([_wide(x)], [_wide(g)], 1e-5), rtol=1e-5)


def try_gluon_sums(device: torch.device) -> None:
    """`gluon.weighted_sums`, with a last chunk of tokens that is not whole, and with a few apart.

    No sample's part of a sum is longer than its norm by Gram matrices says.
    """
    from shuffled_dpsgd.clipping.kernels.gluon import weighted_sums
    from shuffled_dpsgd.clipping.kernels.triton import linear

    D, P = 208, 144
    for T in (77, 197):
        x, clean = _draw(device, SAMPLES, T, D), _draw(device, SAMPLES, T, P)
        norms = linear.gram_sq_norms([x], [clean], True)[0]
        out = torch.empty(P, D, device=device, dtype=torch.float32)
        bias = torch.empty(P, device=device, dtype=torch.float32)
        alone = torch.eye(SAMPLES, device=device, dtype=torch.float32)[0]
        weighted_sums.weighted_outer_sums([x], [clean], alone, [out], False, [bias])
        length = out.double().square().sum() + bias.double().square().sum()
        is_long = bool(length <= norms[0].double())
        expect(is_long, "a norm smaller than the sum of its sample alone")
        g, factors = _poisoned(device, clean)
        weighted_sums.weighted_outer_sums([x], [g], factors, [out], False, [bias])
        wide_g, wide_factors = _wide(g), _wide(factors)
        exact = plain.weighted_outer_sum(_wide(x), wide_g, wide_factors)
        expect_close(out, exact, rtol=1e-5, what="sums")
        exact = plain.weighted_row_sum(wide_g, wide_factors)
        expect_close(bias, exact, rtol=1e-5, what="sums of biases")


def try_float32_products(device: torch.device) -> None:
    """`triton.linear`, `triton.tiles` and `triton.sums` with float32 operands."""
    from shuffled_dpsgd.clipping.kernels.triton import linear, tiles

    floats = torch.float32
    x, clean = (_draw(device, SAMPLES, 70, width, dtype=floats) for width in (72, 136))
    exact = plain.tile_sq_norms(_wide(x), _wide(clean), True)
    _expect_norms(linear.gram_sq_norms([x], [clean], True)[0], exact, 2e-3)
    _expect_norms(tiles.tile_sq_norms([x], [clean], True)[0], exact, 1e-4)
    _try_sums(x, clean, 2e-6)


def _try_sums(x: Tensor, clean: Tensor, rtol: float) -> None:
    """`triton.sums`, added to ones."""
    from shuffled_dpsgd.clipping.kernels.triton import sums

    g, factors = _poisoned(x.device, clean)
    out = torch.ones(clean.shape[2], x.shape[2], device=x.device, dtype=torch.float32)
    sums.weighted_outer_sums([x], [g], factors, [out])
    exact = 1 + plain.weighted_outer_sum(_wide(x), _wide(g), _wide(factors))
    expect_close(out, exact, rtol=rtol, what="sums")
