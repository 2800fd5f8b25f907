"""Gram norms that only a Hopper GPU can run, against their plain definition."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from shuffled_dpsgd.clipping.kernels import choices, plain

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")


@pytest.fixture(autouse=True)
def _needs_hopper() -> None:
    if not choices.is_hopper(DEVICE):
        pytest.skip("written for another device")


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tokens", [129, 160, 192, 193, 197, 208])
@pytest.mark.parametrize("widths", [(72, 136), (256, 64)])
@pytest.mark.parametrize("samples", [1, 2, 9])
def test_norms_are_right_and_never_too_small(
    samples: int, widths: tuple[int, int], tokens: int, bias: bool
) -> None:
    D, P = widths
    # Rows longer than what is read of them, as those of a fused projection are.
    xs = [draw(samples, tokens, D + 8 * layer)[..., :D] for layer in (1, 1, 1)]
    gs = [draw(samples, tokens, P) * scale for scale in (0.1, 1.0, 10.0)]
    found = choices.module("gluon.strips").gram_sq_norms(xs, gs, bias)
    for norms, x, g in zip(found, xs, gs, strict=True):
        expected = plain.tile_sq_norms(x.double(), g.double(), bias)
        assert ((norms - expected) / expected).abs().max() < 5e-3
        assert (norms >= expected * (1 - 1e-6)).all()


def test_a_broken_sample_is_its_own() -> None:
    x, g = draw(4, 197, 64), draw(4, 197, 72)
    kernel = choices.module("gluon.strips").gram_sq_norms
    expected = kernel([x], [g], True)
    x[1, 3, 5], g[2, 190, 7] = float("nan"), float("inf")
    found = kernel([x], [g], True)
    assert torch.equal(found[:, [0, 3]], expected[:, [0, 3]])
    assert not found[:, [1, 2]].isfinite().any()


def test_half_precision_of_the_other_kind() -> None:
    x, g = draw(3, 197, 64, dtype=torch.float16), draw(3, 197, 72, dtype=torch.float16)
    expected = plain.tile_sq_norms(x.double(), g.double(), False)
    found = choices.module("gluon.strips").gram_sq_norms([x], [g], False)[0]
    assert ((found - expected) / expected).abs().max() < 5e-3
