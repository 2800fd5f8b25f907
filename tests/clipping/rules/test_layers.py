"""Every layer kind against the oracle, for shapes drawn by hypothesis."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.pytorch_utils import Conv1D

from clipping.compare import assert_exact
from clipping.tiny_models import Inputs
from shuffled_dpsgd.clipping import ClippingEngine

SMALL = st.integers(1, 5)
SEEDS = st.integers(0, 2**31)
QUICK = settings(max_examples=25, deadline=None)


def squares(model: nn.Module, inputs: Inputs) -> Tensor:
    """A loss whose gradient differs at every position of every sample."""
    out = model(inputs["x"])
    weights = torch.linspace(0.5, 1.5, out[0].numel(), dtype=out.dtype).view(out.shape[1:])
    return (out.pow(2) * weights).flatten(1).sum(1)


def check(model: nn.Module, x: Tensor, **options: Any) -> ClippingEngine:
    model = model.double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    x = x.double() if x.is_floating_point() else x
    return assert_exact(model, squares, {"x": x}, 1e-9, **options)


STRATEGY = st.sampled_from(["bookkeeping", "mixed", "instantiate", "ghost"])


@QUICK
@given(
    batch=SMALL,
    middle=st.lists(SMALL, max_size=2),
    inputs=SMALL,
    outputs=SMALL,
    bias=st.booleans(),
    strategy=STRATEGY,
    seed=SEEDS,
)
def test_linear(
    batch: int, middle: list[int], inputs: int, outputs: int, bias: bool, strategy: str, seed: int
) -> None:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(inputs, outputs, bias=bias))
    check(model, torch.randn(batch, *middle, inputs), strategy=strategy)


@QUICK
@given(batch=SMALL, length=SMALL, inputs=SMALL, outputs=SMALL, strategy=STRATEGY, seed=SEEDS)
def test_hugging_face_conv1d(
    batch: int, length: int, inputs: int, outputs: int, strategy: str, seed: int
) -> None:
    torch.manual_seed(seed)
    model = nn.Sequential(Conv1D(outputs, inputs))
    check(model, torch.randn(batch, length, inputs), strategy=strategy)


@QUICK
@given(
    batch=SMALL,
    middle=st.lists(SMALL, max_size=2),
    rows=st.integers(2, 4),
    width=SMALL,
    padding=st.sampled_from([None, 0, 1]),
    seed=SEEDS,
)
def test_embedding(
    batch: int, middle: list[int], rows: int, width: int, padding: int | None, seed: int
) -> None:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Embedding(rows, width, padding_idx=padding))
    engine = check(model, torch.randint(rows, (batch, *middle)))
    if padding is not None:
        assert not engine.clipped_sum()["0.weight"][padding].any()


@QUICK
@given(
    batch=SMALL,
    middle=st.lists(SMALL, max_size=2),
    width=st.integers(2, 6),
    bias=st.booleans(),
    seed=SEEDS,
)
def test_layer_norm(batch: int, middle: list[int], width: int, bias: bool, seed: int) -> None:
    torch.manual_seed(seed)
    check(nn.Sequential(nn.LayerNorm(width, bias=bias)), torch.randn(batch, *middle, width))


def test_layer_norm_over_several_axes() -> None:
    check(nn.Sequential(nn.LayerNorm([3, 4])), torch.randn(2, 5, 3, 4))


@QUICK
@given(batch=SMALL, middle=st.lists(SMALL, max_size=2), width=st.integers(1, 6), seed=SEEDS)
def test_rms_norm(batch: int, middle: list[int], width: int, seed: int) -> None:
    torch.manual_seed(seed)
    check(nn.Sequential(nn.RMSNorm(width, eps=1e-5)), torch.randn(batch, *middle, width))


@QUICK
@given(
    batch=SMALL,
    groups=st.integers(1, 3),
    each=st.integers(1, 3),
    size=st.integers(2, 4),
    seed=SEEDS,
)
def test_group_norm(batch: int, groups: int, each: int, size: int, seed: int) -> None:
    torch.manual_seed(seed)
    channels = groups * each
    check(nn.Sequential(nn.GroupNorm(groups, channels)), torch.randn(batch, channels, size, size))


CONVOLUTION = {
    "batch": st.integers(1, 3),
    "groups": st.integers(1, 2),
    "kernel": st.integers(1, 3),
    "stride": st.integers(1, 2),
    "dilation": st.integers(1, 2),
    "padding": st.sampled_from([0, 1, "valid"]),
    "mode": st.sampled_from(["zeros", "circular"]),
    "bias": st.booleans(),
    "strategy": STRATEGY,
    "seed": SEEDS,
}


@pytest.mark.parametrize(("layer", "axes"), [(nn.Conv1d, 1), (nn.Conv2d, 2)])
@QUICK
@given(**CONVOLUTION)
def test_convolution(
    layer: type[nn.Module],
    axes: int,
    batch: int,
    groups: int,
    mode: str,
    strategy: str,
    seed: int,
    **geometry: Any,
) -> None:
    torch.manual_seed(seed)
    mode = "zeros" if geometry["padding"] == "valid" else mode
    model = nn.Sequential(
        layer(
            2 * groups,
            2 * groups,
            geometry.pop("kernel"),
            groups=groups,
            padding_mode=mode,
            **geometry,
        )
    )
    check(model, torch.randn(batch, 2 * groups, *[6] * axes), strategy=strategy)


def test_convolution_with_same_padding() -> None:
    check(nn.Sequential(nn.Conv2d(2, 3, 3, padding="same")), torch.randn(2, 2, 5, 5))


@pytest.mark.parametrize("name", ["weight", "bias"])
@pytest.mark.parametrize(
    "layer", [nn.Linear(3, 4), nn.LayerNorm(3), nn.Conv1d(2, 2, 2), nn.GroupNorm(1, 2)], ids=repr
)
def test_half_frozen_layers(layer: nn.Module, name: str) -> None:
    torch.manual_seed(0)
    layer.get_parameter(name).requires_grad_(False)
    try:
        check(nn.Sequential(layer), torch.randn(3, 2, 3))
    finally:
        layer.get_parameter(name).requires_grad_(True)


class SelfAttention(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


class CrossAttention(SelfAttention):
    def forward(self, x: Tensor) -> Tensor:
        out, weights = self.attention(x, x[:, :2], x[:, 1:3])
        return torch.cat([out, weights], 2)


@pytest.mark.parametrize("attention", [SelfAttention, CrossAttention])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("strategy", ["bookkeeping", "instantiate", "ghost"])
def test_multihead_attention(attention: type[SelfAttention], bias: bool, strategy: str) -> None:
    torch.manual_seed(0)
    check(attention(bias=bias), torch.randn(3, 5, 4), strategy=strategy)


@pytest.mark.parametrize("masked", [False, True])
def test_torch_transformer_encoder(masked: bool) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

        def forward(self, x: Tensor) -> Tensor:
            if not masked:
                return self.encoder(x)
            padding = torch.zeros(x.shape[:2], dtype=torch.bool)
            padding[:, -1] = True
            causal = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
            return self.encoder(x, mask=causal, src_key_padding_mask=padding.to(x.dtype) * -1e9)

    check(Encoder(), torch.randn(3, 5, 4))


class Temperature(nn.Module):
    """A parameter that is a single number."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale.exp()


@pytest.mark.parametrize("strategy", ["bookkeeping", "mixed", "instantiate", "ghost"])
def test_parameters_without_axes(strategy: str) -> None:
    again, tied = Temperature(), Temperature()
    tied.scale = again.scale
    model = nn.Sequential(Temperature(), nn.Linear(4, 3), again, again, tied)
    check(model, torch.randn(3, 4, dtype=torch.float64), strategy=strategy)


class ByKeyword(nn.Module):
    """Calls a layer with its input's name."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.name = next(iter(inspect.signature(layer.forward).parameters))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(**{self.name: x})


@pytest.mark.parametrize(
    "layer",
    [
        nn.Linear(4, 3),
        nn.LayerNorm(4),
        nn.RMSNorm(4),
        nn.GroupNorm(2, 4),
        nn.Conv1d(4, 3, 2),
        Conv1D(3, 4),
        LlamaRMSNorm(4),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_layers_are_called_by_keyword(layer: nn.Module) -> None:
    check(ByKeyword(layer), torch.randn(3, 4, 4))


class Hooked(nn.Module):
    """Its author changes a layer's output gradient by hooks, one of them taken off again."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.first, self.layer, self.last = nn.Linear(4, 4), layer, nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.layer(self.first(x).tanh())
        if h.requires_grad:
            h.register_hook(lambda g: g.clamp(-0.1, 0.1))
            h.register_hook(lambda g: g * 7).remove()
            h.register_hook(lambda g: g * 3)
        out: torch.Tensor = self.last(h)
        return out


@pytest.mark.parametrize("shape", [(3, 4), (3, 2, 4)])
@pytest.mark.parametrize(
    "layer", [nn.Linear(4, 4), nn.LayerNorm(4), nn.RMSNorm(4)], ids=lambda m: type(m).__name__
)
def test_hooks_on_an_output_change_what_is_clipped(
    layer: nn.Module, shape: tuple[int, ...]
) -> None:
    check(Hooked(layer), torch.randn(shape))


def test_embeddings_are_called_by_keyword() -> None:
    check(ByKeyword(nn.Embedding(9, 4)), torch.randint(9, (3, 5)))


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize(
    "layer", [nn.GroupNorm(2, 4), nn.RMSNorm(4), nn.LayerNorm(4)], ids=lambda m: type(m).__name__
)
def test_norms_round_under_autocast_as_torch_does(layer: nn.Module) -> None:
    """To the last bit: a maximum further on would be another one, and so its gradient."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), layer)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_()
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(x := torch.randn(64, 4, 4))
        with ClippingEngine(model, clip_norm=1.0):
            found = model(x)
    assert found.dtype is expected.dtype is torch.bfloat16
    assert torch.equal(found, expected)
