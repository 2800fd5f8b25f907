"""The Opacus baseline against our own engine, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from shuffled_dpsgd.clipping import ClippingEngine
from shuffled_dpsgd.clipping.opacus_engine import OpacusEngine
from shuffled_dpsgd.errors import InvalidArgumentError, UnsupportedModuleError
from shuffled_dpsgd.models import build_model
from shuffled_dpsgd.training import make_private

pytest.importorskip("opacus")
pytest.importorskip("transformers")


def summed(engine: Any, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Two backwards; of the second only three samples count."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(4, 300, (5, 7), generator=generator)
    labels = torch.randint(2, (5,), generator=generator)
    for counted in (None, 3):
        with engine:
            losses = F.cross_entropy(model(input_ids=ids).logits, labels, reduction="none")
            engine.backward(losses, counted=counted)
    return {"norms": engine.sample_norms, **engine.clipped_sum()}


def test_it_clips_as_our_engine_does_and_leaves_nothing_behind() -> None:
    model = build_model("bert-tiny", device="cpu").double().train()
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    theirs = summed(OpacusEngine(model, clip_norm=0.5), model)
    assert before == {name: set(vars(module)) for name, module in model.named_modules()}
    assert not any(vars(parameter) for parameter in model.parameters())
    assert all(parameter.grad is None for parameter in model.parameters())
    ours = summed(ClippingEngine(model, clip_norm=0.5), model)
    assert len(theirs["norms"]) == 8
    for name, value in ours.items():
        # Opacus divides by the norm plus 1e-6.
        assert torch.allclose(theirs[name], value, rtol=1e-5, atol=1e-9), name


def test_it_agrees_on_the_bare_parameters_of_a_vit() -> None:
    model = build_model("vit-digits", device="cpu", num_labels=10).double().train()
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(5, 1, 8, 8, generator=generator, dtype=torch.float64)
    sums = []
    for engine in (OpacusEngine(model, clip_norm=0.5), ClippingEngine(model, clip_norm=0.5)):
        with engine:
            losses = F.cross_entropy(model(images).logits, torch.arange(5), reduction="none")
            engine.backward(losses)
        sums.append(engine.clipped_sum())
    for name, value in sums[1].items():
        assert torch.allclose(sums[0][name], value, rtol=1e-5, atol=1e-9), name


def test_a_model_in_eval_mode_is_clipped_as_it_is_and_stays_so() -> None:
    """Opacus itself passes over layers that are not in training mode."""
    model = build_model("bert-tiny", device="cpu").double().eval()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.5  # Were it awake, no two forwards would agree.
    theirs = summed(OpacusEngine(model, clip_norm=0.5), model)
    assert not any(module.training for module in model.modules())
    for name, value in summed(ClippingEngine(model, clip_norm=0.5), model).items():
        assert torch.allclose(theirs[name], value, rtol=1e-5, atol=1e-9), name


def test_a_sample_without_a_finite_gradient_counts_as_zero() -> None:
    model = torch.nn.Linear(4, 2).double()
    inputs = torch.randn(5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    inputs[2] *= torch.inf
    sums = []
    for chosen in (inputs, inputs[[0, 1, 3, 4]]):
        with OpacusEngine(model, clip_norm=0.5) as engine:
            engine.backward(model(chosen).square().sum(1))
        sums.append(engine.clipped_sum())
        assert engine.num_nonfinite == len(chosen) - 4
    for name, value in sums[1].items():
        assert torch.allclose(sums[0][name], value), name


class Scaled(torch.nn.Module):
    """Uses a layer's weight without calling the layer, which hooks do not see."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.inner.weight.T


def test_a_gradient_without_samples_is_refused_by_name() -> None:
    model = Scaled()
    with (
        pytest.raises(UnsupportedModuleError, match=r"inner\.weight"),
        OpacusEngine(model, clip_norm=1.0) as engine,
    ):
        engine.backward(model(torch.randn(3, 4)).sum(1))


@pytest.mark.slow
def test_a_run_trains_with_it() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    data = torch.utils.data.TensorDataset(torch.randn(60, 4), torch.randint(2, (60,)))
    start = model[0].weight.detach().clone()
    private = make_private(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        dataset_size=60,
        expected_batch_size=20,
        num_steps=3,
        epsilon=4.0,
        delta=1e-3,
        method="opacus",
    )
    for x, y in private.batches(data):
        private.backward(F.cross_entropy(model(x), y, reduction="none"))
        private.step()
    assert private.steps_taken == 3
    assert not torch.equal(model[0].weight, start)
    certified = private.card().certified
    assert certified is not None
    assert certified.epsilon < 4.0
    private.close()


def test_it_clips_flat_only() -> None:
    model = torch.nn.Linear(4, 2)
    with pytest.raises(InvalidArgumentError, match="opacus"):
        make_private(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            dataset_size=60,
            expected_batch_size=20,
            num_steps=3,
            noise_multiplier=1.0,
            delta=1e-3,
            method="opacus",
            clip="automatic",
        )
