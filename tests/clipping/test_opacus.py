"""Opacus's per-sample gradients as a second, independent oracle."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clipping.compare import assert_same_sums, run
from clipping.tiny_models import Inputs, bert_classifier
from shuffled_dpsgd.clipping import ClippingEngine

opacus = pytest.importorskip("opacus.grad_sample")
pytestmark = pytest.mark.filterwarnings("ignore")


def opacus_clipped_sum(
    model: nn.Module, losses: Tensor, clip_norm: float
) -> tuple[Tensor, dict[str, Tensor]]:
    losses.sum().backward()
    grads = {n: p.grad_sample for n, p in model.named_parameters() if p.requires_grad}
    norms = torch.stack([g.flatten(1).norm(dim=1) for g in grads.values()]).norm(dim=0)
    factors = (clip_norm / norms).clamp(max=1)
    sums = {n: torch.einsum("b,b...->...", factors, g) for n, g in grads.items()}
    return norms, {name.removeprefix("_module."): value for name, value in sums.items()}


def test_bert_with_explicit_position_ids_agrees_with_opacus() -> None:
    torch.manual_seed(0)
    case = bert_classifier().to(torch.float64)
    size, length = case.inputs["input_ids"].shape
    # Opacus cannot do without the explicit batch axis.
    inputs = case.inputs | {"position_ids": torch.arange(length).expand(size, -1)}
    engine = ClippingEngine(case.model, clip_norm=0.5)
    got = run(engine, case.losses, inputs)
    wrapped = opacus.GradSampleModule(case.model, loss_reduction="sum")
    norms, wanted = opacus_clipped_sum(wrapped, case.losses(wrapped, inputs), 0.5)
    torch.testing.assert_close(engine.sample_norms, norms, rtol=1e-9, atol=0)
    assert_same_sums(got, wanted, 1e-9)


def test_a_small_convolutional_network_agrees_with_opacus() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.GroupNorm(2, 4),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(64, 5),
    ).double()

    def losses(model: nn.Module, inputs: Inputs) -> Tensor:
        return F.cross_entropy(model(inputs["x"]), inputs["y"], reduction="none")

    inputs = {"x": torch.randn(6, 2, 4, 4, dtype=torch.float64), "y": torch.randint(5, (6,))}
    engine = ClippingEngine(model, clip_norm=0.5)
    got = run(engine, losses, inputs)
    wrapped = opacus.GradSampleModule(model, loss_reduction="sum")
    norms, wanted = opacus_clipped_sum(wrapped, losses(wrapped, inputs), 0.5)
    torch.testing.assert_close(engine.sample_norms, norms, rtol=1e-9, atol=0)
    assert_same_sums(got, wanted, 1e-9)
