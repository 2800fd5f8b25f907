"""The engine equals the one-example-at-a-time oracle on real architectures."""

from __future__ import annotations

import pytest
import torch

from clipping.compare import assert_exact, oracle, run, split, total_norm
from clipping.tiny_models import CASES
from shuffled_dpsgd.clipping import ClippingEngine


@pytest.mark.parametrize("name", CASES)
def test_float64_agrees_to_1e9(name: str) -> None:
    torch.manual_seed(0)
    case = CASES[name]().to(torch.float64)
    norms = oracle(case.model, case.losses, case.inputs, 1.0).sample_norms
    # Between the norms, so that some samples are clipped and some are not.
    assert_exact(case.model, case.losses, case.inputs, 1e-9, clip_norm=float(norms.median()))


@pytest.mark.parametrize("name", CASES)
def test_float32_agrees_to_1e5(name: str) -> None:
    torch.manual_seed(1)
    case = CASES[name]()
    assert_exact(case.model, case.losses, case.inputs, 1e-5, clip_norm=0.5)


@pytest.mark.parametrize("name", CASES)
def test_one_sample_never_contributes_more_than_the_clip_norm(name: str) -> None:
    torch.manual_seed(2)
    case = CASES[name]()
    engine = ClippingEngine(case.model, clip_norm=0.1)
    for example in split(case.inputs):
        engine.reset()
        assert total_norm(run(engine, case.losses, example)) <= 0.1 * (1 + 1e-6)


@pytest.mark.parametrize("name", ["gpt2", "vit"])
def test_infinite_clip_is_plain_sgd(name: str) -> None:
    torch.manual_seed(3)
    case = CASES[name]().to(torch.float64)
    got = run(ClippingEngine(case.model, clip="none"), case.losses, case.inputs)
    case.losses(case.model, case.inputs).sum().backward()
    for parameter_name, parameter in case.model.named_parameters():
        torch.testing.assert_close(got[parameter_name], parameter.grad, rtol=1e-9, atol=1e-12)
