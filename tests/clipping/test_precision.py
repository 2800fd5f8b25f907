"""Half precision: norms, factors and sums stay in float32, and no sample exceeds its bound."""

from __future__ import annotations

import pytest
import torch
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
