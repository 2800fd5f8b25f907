"""Half precision: norms, factors and sums stay in float32, and no sample exceeds its bound."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from clipping.compare import run, split, total_norm
from clipping.tiny_models import CASES, Inputs
from shuffled_dpsgd.clipping import ClippingEngine

MODELS = ("gpt2", "bert-mlm", "roberta-mlm", "vit", "llama-tied", "gpt2-lora")


def autocast_run(
    engine: ClippingEngine, losses: object, inputs: Inputs, dtype: torch.dtype
) -> dict[str, Tensor]:
    with engine, torch.autocast("cpu", dtype=dtype):
        engine.backward(losses(engine.model, inputs))  # type: ignore[operator]
    return engine.clipped_sum()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", MODELS)
def test_autocast_matches_plain_autocast_gradients(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    case = CASES[name]()
    engine = ClippingEngine(case.model, clip="none")
    got = autocast_run(engine, case.losses, case.inputs, dtype)
    assert engine.sample_norms.dtype == torch.float32
    assert all(value.dtype == torch.float32 for value in got.values())
    with torch.autocast("cpu", dtype=dtype):
        loss = case.losses(case.model, case.inputs).sum()
    loss.backward()
    wanted = {n: p.grad for n, p in case.model.named_parameters() if p.requires_grad}
    difference = {n: got[n] - wanted[n] for n in wanted}
    assert total_norm(difference) <= 0.05 * total_norm(wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", MODELS)
def test_no_sample_exceeds_the_bound_under_autocast(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    case = CASES[name]()
    engine = ClippingEngine(case.model, clip_norm=0.1)
    for example in split(case.inputs):
        engine.reset()
        got = autocast_run(engine, case.losses, example, dtype)
        assert total_norm(got) <= 0.1 * (1 + 1e-6)
        assert total_norm(got) >= 0.1 * (1 - 1e-5)


@pytest.mark.parametrize("strategy", ["bookkeeping", "ghost", "mixed", "instantiate"])
def test_no_sample_exceeds_the_bound_in_a_bfloat16_model(strategy: str) -> None:
    torch.manual_seed(2)
    case = CASES["gpt2"]().to(torch.bfloat16)
    engine = ClippingEngine(case.model, clip_norm=0.1, strategy=strategy)
    for example in split(case.inputs):
        engine.reset()
        got = run(engine, case.losses, example)
        assert all(value.dtype == torch.float32 for value in got.values())
        assert total_norm(got) <= 0.1 * (1 + 1e-6)


def test_long_sums_keep_the_bound_in_float32() -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    engine = ClippingEngine(model, clip_norm=1.0)
    for scale in (1e-3, 1.0, 1e3):
        engine.reset()
        x = scale * torch.randn(1, 512, 64)
        got = run(engine, lambda m, i: m(i["x"]).square().sum((1, 2)), {"x": x})
        assert total_norm(got) <= 1 + 1e-6


def test_backward_inside_autocast_still_sums_in_float32() -> None:
    torch.manual_seed(4)
    case = CASES["gpt2"]()
    outside = ClippingEngine(case.model)
    with outside:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            losses = case.losses(case.model, case.inputs)
        outside.backward(losses)
    inside = ClippingEngine(case.model)
    got = autocast_run(inside, case.losses, case.inputs, torch.bfloat16)
    for name, wanted in outside.clipped_sum().items():
        torch.testing.assert_close(got[name], wanted, rtol=1e-4, atol=1e-6)


@settings(max_examples=60, deadline=None)
@given(
    length=st.integers(1, 40),
    width=st.integers(1, 48),
    exponent=st.integers(-6, 6),
    repeats=st.integers(1, 4),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    strategy=st.sampled_from(["bookkeeping", "ghost", "mixed", "instantiate"]),
    seed=st.integers(0, 2**31),
)
def test_the_bound_holds_for_any_shape_and_scale(
    length: int,
    width: int,
    exponent: int,
    repeats: int,
    dtype: torch.dtype,
    strategy: str,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(width, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, width)
    ).to(dtype)
    x = 10.0**exponent * torch.randn(1, length, width).repeat_interleave(repeats, 1)
    weights = torch.randn(length * repeats, width).to(dtype)
    engine = ClippingEngine(model, clip_norm=1e-3, strategy=strategy)
    got = run(engine, lambda m, i: (m(i["x"]) * weights).sum((1, 2)), {"x": x.to(dtype)})
    assert total_norm(got) <= 1e-3 * (1 + 1e-6)


class TestCancellation:
    """Gradients that are small differences of large terms must not escape their clipping."""

    @pytest.mark.parametrize("strategy", ["bookkeeping", "ghost", "mixed", "instantiate"])
    @pytest.mark.parametrize("spread", [1e-1, 1e-3, 1e-5, 0.0])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_linear(self, strategy: str, spread: float, dtype: torch.dtype) -> None:
        torch.manual_seed(5)
        model = nn.Linear(64, 64).to(dtype)
        x = (torch.randn(64) + spread * torch.randn(1, 30, 64)).to(dtype)
        weights = torch.randn(15, 64).repeat_interleave(2, 0)
        weights[1::2] *= -1
        engine = ClippingEngine(model, clip_norm=1e-3, strategy=strategy)
        got = run(engine, lambda m, i: (m(i["x"]) * weights.to(dtype)).sum((1, 2)), {"x": x})
        assert total_norm(got) <= 1e-3 * (1 + 1e-6)

    @pytest.mark.gpu
    @pytest.mark.parametrize("spread", [1e-1, 1e-2, 1e-3])
    @pytest.mark.parametrize("width", [64, 768])
    def test_linear_on_tensor_cores(self, spread: float, width: int) -> None:
        torch.manual_seed(8)
        model = nn.Linear(width, width).to("cuda", torch.bfloat16)
        x = (torch.randn(width) + spread * torch.randn(2, 30, width)).to("cuda", torch.bfloat16)
        weights = torch.randn(15, width).repeat_interleave(2, 0)
        weights[1::2] *= -1
        weights = weights.to("cuda", torch.bfloat16)
        for strategy in ("bookkeeping", "ghost"):
            engine = ClippingEngine(model, clip_norm=1e-3, strategy=strategy)
            # Norms are rounded up where terms cancel, so plain autograd's are smaller.
            engine.use_referee(None)
            for one in x.split(1):
                engine.reset()
                got = run(engine, lambda m, i: (m(i["x"]) * weights).sum((1, 2)), {"x": one})
                assert total_norm(got) <= 1e-3 * (1 + 1e-6)

    def test_repeated_token(self) -> None:
        torch.manual_seed(6)
        model = nn.Embedding(3, 64)
        weights = torch.randn(20, 64).repeat_interleave(2, 0)
        weights[1::2] *= -1 + 1e-5
        engine = ClippingEngine(model, clip_norm=1e-6)
        ids = torch.ones(1, 40, dtype=torch.long)
        got = run(engine, lambda m, i: (m(i["x"]) * weights).sum((1, 2)), {"x": ids})
        assert 0.5e-6 <= total_norm(got) <= 1e-6 * (1 + 1e-6)

    def test_head_against_embedding(self) -> None:
        class Opposed(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.table = nn.Embedding(1, 64)
                self.head = nn.Linear(64, 1, bias=False)
                self.head.weight = self.table.weight

            def forward(self, ids: Tensor) -> Tensor:
                rows = self.table(ids)
                return self.head(rows.detach()) - (1 + 1e-6) * (rows * rows.detach()).sum(2, True)

        torch.manual_seed(7)
        engine = ClippingEngine(Opposed(), clip_norm=1e-7)
        # Plain autograd rounds otherwise, and all of this is rounding.
        engine.use_referee(None)
        ids = torch.zeros(1, 3, dtype=torch.long)
        got = run(engine, lambda m, i: m(i["x"]).sum((1, 2)), {"x": ids})
        assert total_norm(got) <= 1e-7 * (1 + 1e-6)
