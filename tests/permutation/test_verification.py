"""`verify` passes what is right, catches what is wrong, and leaves the model as it was."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import transformers
from torch import nn

from permutation.zoo import FAMILIES, SMALL, text_batch
from shuffled_dpsgd.errors import InvarianceError
from shuffled_dpsgd.permutation import Block, Group, Member, PermutationSpec, discover, verify


def plant(spec: PermutationSpec, wrong: Group) -> PermutationSpec:
    return replace(spec, groups=(*spec.groups, wrong))


def without(spec: PermutationSpec, parameter: str) -> PermutationSpec:
    """The spec with one parameter forgotten everywhere."""
    return replace(
        spec,
        groups=tuple(
            replace(g, members=tuple(m for m in g.members if m.parameter != parameter))
            for g in spec.groups
        ),
    )


@pytest.mark.parametrize("family", ["bert", "vit", "gpt2", "llama"])
def test_right_specs_pass(family: str) -> None:
    specimen = FAMILIES[family]()
    for scope in ("paper", "full"):
        found = verify(specimen.model, specimen.batch, scope=scope)
        assert 0.0 < found.worst_deviation <= found.tolerance
        assert found.to_json()["num_draws"] == 2


def test_every_forgotten_tensor_is_caught() -> None:
    specimen = FAMILIES["bert"]().double()
    spec = discover(specimen.model, scope="full")
    # A key bias shifts all scores of a query alike, so softmax ignores it wherever it stands.
    for name in sorted(n for n in spec.moved_names if not n.endswith("key.bias")):
        with pytest.raises(InvarianceError):
            verify(specimen.model, specimen.batch, without(spec, name), num_draws=1)


@pytest.mark.parametrize(
    "wrong",
    [
        Group(
            name="class axis",
            kind="mlp-hidden",
            size=4,
            members=(
                Member(parameter="classifier.weight", axis=0),
                Member(parameter="classifier.bias", axis=0),
            ),
        ),
        Group(
            name="query without key",
            kind="query-key",
            size=8,
            members=(
                Member(
                    parameter="bert.encoder.layer.0.attention.self.query.weight",
                    axis=0,
                    block=Block(start=8),
                ),
            ),
        ),
    ],
    ids=lambda group: group.name,
)
def test_a_planted_group_is_caught(wrong: Group) -> None:
    specimen = FAMILIES["bert"]()
    spec = plant(discover(specimen.model), wrong)
    with pytest.raises(InvarianceError, match="permuting changed the model"):
        verify(specimen.model, specimen.batch, spec)


def test_a_forgotten_zero_bias_is_caught_through_its_gradient() -> None:
    model = transformers.BertForSequenceClassification(transformers.BertConfig(**SMALL))
    bias = "bert.encoder.layer.1.intermediate.dense.bias"
    assert not model.get_parameter(bias).any()
    with pytest.raises(InvarianceError, match=r"layer\.1\.intermediate\.dense\.bias"):
        verify(model, text_batch(), without(discover(model), bias))


def test_the_model_is_left_as_it_was() -> None:
    specimen = FAMILIES["gpt2"]()
    model = specimen.model.train()
    frozen = next(model.parameters())
    frozen.requires_grad_(False)
    last = list(model.parameters())[-1]
    last.grad = torch.ones_like(last)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    wrong = without(discover(model, scope="full"), "transformer.ln_f.bias")
    with pytest.raises(InvarianceError):
        verify(model, specimen.batch, wrong)
    verify(model, specimen.batch, scope="full")
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert model.training
    assert not frozen.requires_grad
    assert torch.equal(last.grad, torch.ones_like(last))


def test_batches_may_be_tensors_or_tuples_and_losses_given() -> None:
    model = nn.Linear(3, 2)
    spec = discover(model)
    x = torch.randn(4, 3)
    for batch in (x, (x,), {"input": x}):
        found = verify(model, batch, spec, loss=lambda out: out.square().sum(dim=1))
        assert found.worst_deviation == 0.0
