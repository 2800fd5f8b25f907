"""The public checks pass what is clipped exactly, and find what is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shuffled_dpsgd.clipping import DenseGrad, Slot, batch_of, recorder_of
from shuffled_dpsgd.clipping.rules import BY_TYPE
from shuffled_dpsgd.clipping.rules.linear import LinearSlot
from shuffled_dpsgd.errors import InvalidArgumentError, RefereeError, UnsupportedModuleError
from shuffled_dpsgd.testing import check_model, check_rule


class Doubled(nn.Linear):
    """A layer of a third party, whose forward is not that of its base."""

    def forward(self, input: Tensor) -> Tensor:
        return 2 * F.linear(input, self.weight, self.bias)


class Mixing(nn.Linear):
    """Every sample sees the mean of its batch."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input - input.mean(0), self.weight, self.bias)


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.LayerNorm(7), nn.Linear(7, 3))


@pytest.mark.parametrize(
    "module",
    [nn.Linear(4, 3), nn.Embedding(9, 4), nn.LayerNorm(4), nn.Conv2d(2, 3, 2), Doubled(4, 3)],
    ids=lambda module: type(module).__name__,
)
def test_layers_conform(module: nn.Module) -> None:
    found = check_rule(module)
    assert (found.samples, found.unchecked) == (4, ())
    assert found.rules.keys() == dict(module.named_parameters()).keys()


def test_a_model_conforms_and_is_left_as_it_is() -> None:
    model = small()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = check_model(model, torch.randn(6, 5))
    assert found.rules.keys() == dict(model.named_parameters()).keys()
    assert model.training
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(p.grad is None and p.dtype == torch.float32 for p in model.parameters())
    labels = torch.randint(3, (6,))

    def losses(module: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(module(batch[0]), batch[1], reduction="none")

    assert check_model(model, (torch.randn(6, 5), labels), losses).samples == 6


def test_models_of_hugging_face_conform() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.BertConfig(vocab_size=30, intermediate_size=20, **sizes)
    batch = {"input_ids": torch.randint(30, (3, 5)), "attention_mask": torch.ones(3, 5)}
    assert check_model(transformers.BertForSequenceClassification(config), batch).samples == 3


def test_a_wrong_rule_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BY_TYPE, Doubled, LinearSlot)
    with pytest.raises(UnsupportedModuleError, match="bias: the sum of clipped gradients"):
        check_rule(Doubled(4, 3))


class Scale(nn.Module):
    """A layer of a third party."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 2.0, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class ScaleFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, slot: Slot, batch: Any, anchor: Any) -> Tensor:
        ctx.slot, ctx.batch = slot, batch
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x, scale), (g,) = ctx.saved_tensors, grads
        anchor = recorder_of(ctx.slot).record(ctx.batch, ctx.slot, (x, g))
        return g * scale, None, None, None, anchor


class WrongSlot(Slot):
    """A rule for it whose gradients are a hundred times too large."""

    kind = "wrong"

    @classmethod
    def accepts(cls, module: nn.Module) -> bool:
        return [*module._parameters] == ["scale"]

    def forward(self, x: Tensor) -> Any:
        if not torch.is_grad_enabled():
            return self.plain(x)
        batch, anchor = batch_of(self), recorder_of(self).anchor
        return ScaleFunction.apply(x, self.parameters["scale"], self, batch, anchor)

    def contributions(self, capture: Any) -> Any:
        yield self.names["scale"], DenseGrad(grads_BS=100 * capture.x * capture.g)


class Apart(nn.Module):
    """Has that layer in a place that its gradient may not leave."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.base, self.layer, self.last = nn.Linear(4, 4), Scale(), nn.Linear(4, 4)
        self.place = place
        nn.init.zeros_(self.last.weight)

    def forward(self, x: Tensor) -> Any:
        if self.place == "unused":
            return self.base(x) + self.last(x)
        if self.place == "constant":
            return self.base(x) + self.last(x) + 0.0 * self.layer(x)
        if self.place == "nested":
            return self.base(x), {"more": (self.layer(x),)}, self.last(x)
        return self.base(x) + self.last(self.layer(x))


@pytest.mark.parametrize("place", ["behind zeros", "nested"])
def test_a_wrong_rule_is_found_wherever_it_stands(
    monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.setitem(BY_TYPE, Scale, WrongSlot)
    with pytest.raises(UnsupportedModuleError, match=r"layer\.scale"):
        check_model(Apart(place), torch.randn(4, 4))


@pytest.mark.parametrize("place", ["unused", "constant"])
def test_a_rule_that_was_not_exercised_is_not_called_checked(
    monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.setitem(BY_TYPE, Scale, WrongSlot)
    found = check_model(Apart(place), torch.randn(4, 4))
    assert found.unchecked == ("layer.scale",)
    assert found.rules.keys() == {f"{a}.{b}" for a in ("base", "last") for b in ("weight", "bias")}


@pytest.mark.parametrize(
    ("place", "found"),
    [("clipped_sum", "bias, in one batch"), ("sample_norms", "sample 1, in one batch")],
)
def test_small_faults_are_found(monkeypatch: pytest.MonkeyPatch, place: str, found: str) -> None:
    """What the engine's own referee lets pass: it looks in a run's precision, not in float64."""
    from shuffled_dpsgd import testing

    right = testing._run

    def faulty(*arguments: Any) -> Any:
        got = right(*arguments)
        wrong = got.sample_norms[1:2] if place == "sample_norms" else got.clipped_sum["bias"]
        wrong *= 1.0 + 1e-6
        return got

    monkeypatch.setattr(testing, "_run", faulty)
    with pytest.raises(RefereeError, match=found):
        check_rule(nn.Linear(4, 3))


def test_what_samples_share_is_refused() -> None:
    with pytest.raises(RefereeError, match="depends on the others"):
        check_rule(Mixing(4, 3))
    with pytest.raises(UnsupportedModuleError, match="1"):
        check_model(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), torch.randn(4, 4))


def test_what_cannot_be_checked_is_said() -> None:
    class Unknown(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight

    assert check_rule(Unknown(), torch.randn(4, 3)).samples == 4
    with pytest.raises(InvalidArgumentError, match="inputs"):
        check_rule(Unknown())
    with pytest.raises(InvalidArgumentError, match="two samples"):
        check_model(small(), torch.randn(1, 5))
    with pytest.raises(InvalidArgumentError, match="gradient"):
        check_rule(nn.Linear(4, 3, bias=False), torch.zeros(4, 3, 4))
