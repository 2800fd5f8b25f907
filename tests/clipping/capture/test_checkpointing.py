"""Layers called again by activation checkpointing are recorded once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from clipping.compare import assert_exact, run
from clipping.tiny_models import Inputs, gpt2, llama
from shuffled_dpsgd.clipping import ClippingEngine
from shuffled_dpsgd.models import checkpoint_activations


def losses(model: nn.Module, inputs: Inputs) -> Tensor:
    return model(inputs["x"]).square().flatten(1).sum(1)


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.LayerNorm(4)) for _ in range(3)
        )
        self.first = nn.Linear(4, 4)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("clip", ["flat", "per-layer"])
def test_activation_checkpointing(reentrant: bool, clip: str) -> None:
    torch.manual_seed(2)
    x = torch.randn(3, 5, 4, dtype=torch.float64)
    model = Checkpointed(reentrant).double()
    engine = ClippingEngine(model, clip=clip)
    with engine:
        losses(model, {"x": x}).sum().backward()
    plain = nn.Sequential(model.first, *model.blocks)
    other = ClippingEngine(plain, clip=clip)
    with other:
        losses(plain, {"x": x}).sum().backward()
    torch.testing.assert_close(engine.sample_norms, other.sample_norms, rtol=1e-12, atol=0)
    named = {id(p): n for n, p in plain.named_parameters()}
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            engine.clipped_sum()[name],
            other.clipped_sum()[named[id(parameter)]],
            rtol=1e-10,
            atol=1e-12,
        )


@pytest.mark.parametrize("build", [gpt2, lambda: llama(tied=True)])
def test_hugging_face_gradient_checkpointing(build: Callable[[], object]) -> None:
    torch.manual_seed(3)
    case = build().to(torch.float64)  # type: ignore[attr-defined]
    checkpoint_activations(case.model)
    case.model.train()
    assert_exact(case.model, case.losses, case.inputs)


@pytest.mark.parametrize("strategy", ["bookkeeping", "ghost"])
def test_a_checkpointed_module_may_be_called_twice(strategy: str) -> None:
    class Twice(nn.Module):
        checkpoints = False

        def __init__(self) -> None:
            super().__init__()
            self.first, self.block = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh())

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for _ in range(2):
                again = self.checkpoints
                x = checkpoint(self.block, x, use_reentrant=True) if again else self.block(x)
            return x

    torch.manual_seed(4)
    inputs, model = {"x": torch.randn(3, 5, 4, dtype=torch.float64)}, Twice().double()
    plain = assert_exact(model, losses, inputs, strategy=strategy)
    model.checkpoints = True
    engine = ClippingEngine(model, strategy=strategy)
    found = run(engine, losses, inputs)
    torch.testing.assert_close(engine.sample_norms, plain.sample_norms, rtol=1e-12, atol=0)
    torch.testing.assert_close(found, plain.clipped_sum(), rtol=1e-10, atol=1e-12)
