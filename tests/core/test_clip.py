"""The oracle itself, against gradients written out by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shuffled_dpsgd.clipping import clipped_sum_reference
from shuffled_dpsgd.errors import InvalidArgumentError


def linear() -> nn.Linear:
    layer = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        layer.weight.zero_()
    return layer


def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).sum()


def test_by_hand() -> None:
    # The gradient of w·x in w is x itself.
    examples = [torch.tensor([3.0, 4.0]), torch.tensor([0.0, 0.5])]
    found = clipped_sum_reference(linear(), loss, examples, clip_norm=1.0)
    assert found.sample_norms.tolist() == [5.0, 0.5]
    torch.testing.assert_close(found.clipped_sum["weight"], torch.tensor([[0.6, 1.3]]))


def test_non_finite_examples_contribute_zero() -> None:
    examples = [torch.tensor([float("nan"), 1.0]), torch.tensor([0.0, 0.5])]
    found = clipped_sum_reference(linear(), loss, examples)
    assert found.clipped_sum["weight"].tolist() == [[0.0, 0.5]]


def test_no_examples_give_zeros_and_no_gradient_is_left() -> None:
    model = linear()
    found = clipped_sum_reference(model, loss, [])
    assert found.sample_norms.shape == (0,)
    assert not found.clipped_sum["weight"].any()
    clipped_sum_reference(model, loss, [torch.ones(2)])
    assert model.weight.grad is None


def test_per_layer_groups_must_cover_the_model() -> None:
    with pytest.raises(InvalidArgumentError, match="groups"):
        clipped_sum_reference(linear(), loss, [torch.ones(2)], clip="per-layer", groups=[[]])
