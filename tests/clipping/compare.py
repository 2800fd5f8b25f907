"""Compare the engine with the oracle that takes one example at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from clipping.tiny_models import Inputs, Losses
from shuffled_dpsgd.clipping import ClippingEngine
from shuffled_dpsgd.clipping.reference import ReferenceSum, clipped_sum_reference


def split(inputs: Inputs) -> list[Inputs]:
    """A batch as batches of one."""
    size = len(next(iter(inputs.values())))
    return [{key: value[i : i + 1] for key, value in inputs.items()} for i in range(size)]


def oracle(
    model: nn.Module, losses: Losses, inputs: Inputs, clip_norm: float, **options: Any
) -> ReferenceSum:
    return clipped_sum_reference(
        model, lambda m, one: losses(m, one).sum(), split(inputs), clip_norm, **options
    )


def run(engine: ClippingEngine, losses: Losses, inputs: Inputs) -> dict[str, Tensor]:
    with engine:
        engine.backward(losses(engine.model, inputs))
    return engine.clipped_sum()


def total_norm(tensors: dict[str, Tensor]) -> Tensor:
    return torch.stack([value.double().norm() for value in tensors.values()]).norm()


def assert_same_sums(got: dict[str, Tensor], wanted: dict[str, Tensor], rtol: float) -> None:
    """Every parameter agrees, relative to itself and (for those near zero) to the whole."""
    assert got.keys() == wanted.keys()
    floor = 1e-2 * total_norm(wanted)
    for name, expected in wanted.items():
        error = (got[name].double() - expected.double()).norm()
        scale = torch.maximum(expected.double().norm(), floor)
        assert error <= rtol * scale, f"{name}: off by {error / scale:.2e}"


def assert_exact(
    model: nn.Module,
    losses: Losses,
    inputs: Inputs,
    rtol: float = 1e-9,
    clip_norm: float = 1.0,
    **options: Any,
) -> ClippingEngine:
    """The engine's norms and sums equal the oracle's; returns the engine."""
    engine = ClippingEngine(model, clip_norm=clip_norm, **options)
    got = run(engine, losses, inputs)
    wanted = oracle(model, losses, inputs, clip_norm, clip=options.get("clip", "flat"))
    norms = engine.sample_norms.double().cpu()
    torch.testing.assert_close(norms, wanted.sample_norms.double(), rtol=rtol, atol=0)
    assert_same_sums(got, wanted.clipped_sum, rtol)
    return engine
