"""Convolutions with a stride as wide as the kernel, such as ViT's patches, against the oracle."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from clipping.compare import assert_exact
from shuffled_dpsgd.clipping import ClippingEngine

STRATEGY = st.sampled_from(["bookkeeping", "instantiate", "ghost"])


def losses(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    out = model(inputs["x"])
    weights = torch.linspace(0.5, 1.5, out[0].numel(), dtype=out.dtype).view(out.shape[1:])
    return (out.pow(2) * weights).flatten(1).sum(1)


@settings(max_examples=30, deadline=None)
@given(
    batch=st.integers(1, 3),
    sides=st.lists(st.integers(3, 7), min_size=1, max_size=2),
    kernel=st.integers(1, 3),
    bias=st.booleans(),
    is_first=st.booleans(),
    strategy=STRATEGY,
)
def test_patches_of_any_size_are_exact(
    batch: int, sides: list[int], kernel: int, bias: bool, is_first: bool, strategy: str
) -> None:
    """With what is left over at the edges, and with layers before it that need a gradient."""
    torch.manual_seed(0)
    layer = nn.Conv1d if len(sides) == 1 else nn.Conv2d
    patches = layer(2, 3, kernel, stride=kernel, bias=bias)
    before = [] if is_first else [layer(2, 2, 3, padding=1), nn.Tanh()]
    model = nn.Sequential(*before, patches).double()
    x = torch.randn(batch, 2, *sides, dtype=torch.float64)
    assert_exact(model, losses, {"x": x}, 1e-9, clip_norm=0.5, strategy=strategy)


@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last])
def test_the_output_is_torchs_own_and_lies_as_that_does(memory: torch.memory_format) -> None:
    torch.manual_seed(0)
    layer = nn.Conv2d(3, 8, 2, stride=2).double().to(memory_format=memory)
    model = nn.Sequential(layer)
    x = torch.randn(2, 3, 5, 6, dtype=torch.float64).to(memory_format=memory)
    wanted = layer(x)
    engine = ClippingEngine(model)
    with engine:
        found = model(x)
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
        assert found.stride() == wanted.stride()
        engine.backward(found.flatten(1).sum(1))


def test_under_autocast_patches_are_in_half_precision() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 2, stride=2))
    x = torch.randn(2, 3, 4, 4)
    engine = ClippingEngine(model)
    with engine:
        with torch.autocast("cpu", torch.bfloat16):
            out = model(x)
        assert out.dtype is torch.bfloat16
        engine.backward(out.float().flatten(1).sum(1))
    assert engine.clipped_sum()["0.weight"].dtype is torch.float32


def test_an_input_smaller_than_a_patch_is_torchs_error() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 4, stride=4))
    engine = ClippingEngine(model)
    with pytest.raises(RuntimeError, match="Kernel size"), engine:
        model(torch.randn(2, 1, 3, 8))
