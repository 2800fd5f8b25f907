"""Applying keeps storage, ties, dtype and flags, and moves every optimizer's state along."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from permutation.zoo import FAMILIES, Specimen
from shuffled_dpsgd.errors import InvalidArgumentError, UnsupportedModuleError
from shuffled_dpsgd.permutation import Permutation, apply, apply_to_tensors, discover, draw
from shuffled_dpsgd.permutation.moving import gather_

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01),
    "sgd-momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True),
    "adam-amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
}


def train(specimen: Specimen, optimizer: torch.optim.Optimizer, num_steps: int) -> None:
    for _ in range(num_steps):
        optimizer.zero_grad()
        specimen.losses(specimen.logits()).sum().backward()
        optimizer.step()


def shuffle(specimen: Specimen, seed: int = 0) -> Permutation:
    spec = discover(specimen.model, scope="full")
    return draw(spec, torch.Generator().manual_seed(seed))


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("family", ["bert", "vit", "gpt2"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training_commutes_with_permuting(family: str, optimizer: str) -> None:
    straight = FAMILIES[family]().double()
    moved = Specimen(
        model=copy.deepcopy(straight.model), batch=straight.batch, losses=straight.losses
    )
    permutation = shuffle(straight)
    in_straight = OPTIMIZERS[optimizer](straight.model.parameters())
    train(straight, in_straight, 5)

    in_moved = OPTIMIZERS[optimizer](moved.model.parameters())
    train(moved, in_moved, 2)
    apply(permutation, moved.model, in_moved)
    train(moved, in_moved, 3)

    expected = weights(straight.model)
    apply_to_tensors(permutation, expected)
    for name, found in weights(moved.model).items():
        # Softmax ignores a key bias: its gradient is rounding, which Adam rescales to its step.
        if name.endswith(("key.bias", "k_proj.bias")):
            continue
        meaningful = slice(None)
        if name.endswith("c_attn.bias"):
            third = len(found) // 3
            meaningful = torch.cat([torch.arange(third), torch.arange(2 * third, 3 * third)])
        torch.testing.assert_close(
            found[meaningful], expected[name][meaningful], rtol=1e-10, atol=1e-10, msg=name
        )


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_inverse_restores_optimizer_state_and_gradients_bit_for_bit(optimizer: str) -> None:
    specimen = FAMILIES["gpt2"]()
    state = OPTIMIZERS[optimizer](specimen.model.parameters())
    train(specimen, state, 2)
    before = copy.deepcopy(state.state_dict())
    grads = {n: p.grad.clone() for n, p in specimen.model.named_parameters()}
    permutation = shuffle(specimen)
    apply(permutation, specimen.model, state)
    assert not torch.equal(specimen.model.transformer.wte.weight.grad, grads[next(iter(grads))])
    apply(permutation.inverse(), specimen.model, state)
    for name, parameter in specimen.model.named_parameters():
        assert torch.equal(parameter.grad, grads[name]), name
    for index, entries in state.state_dict()["state"].items():
        for key, value in entries.items():
            expected = before["state"][index][key]
            assert (
                torch.equal(value, expected)
                if isinstance(value, torch.Tensor)
                else (value == expected)
            )


def test_capturable_step_counts_stay() -> None:
    specimen = FAMILIES["gpt2"]()
    state = OPTIMIZERS["adamw-fused"](specimen.model.parameters())
    train(specimen, state, 1)
    for entries in state.state.values():
        entries["step"] = torch.tensor([3.0])
    apply(shuffle(specimen), specimen.model, state)
    assert all(entries["step"].item() == 3.0 for entries in state.state.values())


def test_storage_ties_dtype_and_flags_stay() -> None:
    specimen = FAMILIES["gpt2"]()
    model = specimen.model.to(torch.bfloat16)
    for parameter in list(model.parameters())[::2]:
        parameter.requires_grad_(False)
    before = {
        name: (p.data_ptr(), p.dtype, p.requires_grad, p.stride(), id(p))
        for name, p in model.named_parameters()
    }
    apply(shuffle(specimen), model)
    assert before == {
        name: (p.data_ptr(), p.dtype, p.requires_grad, p.stride(), id(p))
        for name, p in model.named_parameters()
    }
    assert model.lm_head.weight is model.transformer.wte.weight


def test_a_frozen_half_moves_along() -> None:
    """Frozen weights must follow, or the function would change."""
    specimen = FAMILIES["bert"]().double()
    for parameter in specimen.model.bert.encoder.layer[0].parameters():
        parameter.requires_grad_(False)
    before = specimen.logits().detach()
    frozen = specimen.model.bert.encoder.layer[0].intermediate.dense.weight
    kept = frozen.detach().clone()
    apply(shuffle(specimen), specimen.model)
    assert not torch.equal(frozen, kept)
    assert not frozen.requires_grad
    torch.testing.assert_close(specimen.logits().detach(), before, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "shape", [(40, 30), (7, 5, 300), (3, 50, 4, 60), (2000, 300), (1100, 2000)]
)
def test_gathering_equals_plain_indexing(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    for axes in ([0], [len(shape) - 1], [0, len(shape) - 1], list(range(len(shape)))):
        for layout in (lambda t: t, lambda t: t.transpose(0, -1).contiguous().transpose(0, -1)):
            tensor = layout(torch.randn(shape, generator=generator))
            index = {a: torch.randperm(shape[a], generator=generator) for a in axes}
            expected = tensor
            for axis, order in index.items():
                expected = expected.index_select(axis, order)
            gather_(tensor, list(index.items()))
            assert torch.equal(tensor, expected)


def random_bits(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Any bits, not-a-numbers with payloads included."""
    generator = torch.Generator().manual_seed(0)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    return (
        torch.randint(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), generator=generator)
        .to(torch.uint8)
        .view(dtype)
    )


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.bool, torch.complex128], ids=str
)
@pytest.mark.parametrize("shape", [(501,), (101, 37), (37, 203), (53, 3, 11)])
def test_every_bit_of_every_dtype_moves(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    last = len(shape) - 1
    for axes in ([0], [last], sorted({0, last})):
        tensor = random_bits(shape, dtype)
        index = {axis: torch.randperm(shape[axis]) for axis in axes}
        expected = tensor
        for axis, order in index.items():
            expected = expected[(slice(None),) * axis + (order,)]
        place = tensor.data_ptr()
        gather_(tensor, list(index.items()))
        assert torch.equal(tensor.view(torch.uint8), expected.view(torch.uint8))
        assert tensor.data_ptr() == place


@pytest.mark.parametrize("shape", [(30, 20), (300, 200)])
def test_autograd_refuses_a_backward_over_moved_weights(shape: tuple[int, int]) -> None:
    for axes in ([0], [1], [0, 1]):
        weight = torch.randn(shape, requires_grad=True)
        loss = (weight * weight).sum()
        with torch.no_grad():
            gather_(weight, [(axis, torch.randperm(weight.shape[axis])) for axis in axes])
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_a_conjugated_view_moves_as_any_other() -> None:
    tensor = torch.randn(600, 100, dtype=torch.complex64)
    index = torch.randperm(600)
    expected = tensor.conj().resolve_conj()[index]
    gather_(tensor.conj(), [(0, index)])
    assert torch.equal(tensor.conj(), expected)


def test_a_model_on_the_meta_device_is_discovered_but_not_moved() -> None:
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1))
    spec = discover(model, scope="full")
    assert spec.shuffle_ratio == 1.0
    with pytest.raises(InvalidArgumentError, match="meta device"):
        apply(draw(spec, torch.Generator()), model)


def test_another_model_is_refused() -> None:
    permutation = shuffle(FAMILIES["bert"]())
    with pytest.raises(InvalidArgumentError, match="call discover on this model"):
        apply(permutation, FAMILIES["gpt2"]().model)
    with pytest.raises(InvalidArgumentError, match="classifier"):
        apply_to_tensors(permutation, {"classifier.weight": torch.zeros(3)})


def test_unknown_optimizer_state_is_refused_before_anything_moves() -> None:
    specimen = FAMILIES["vit"]()
    state = OPTIMIZERS["adamw"](specimen.model.parameters())
    train(specimen, state, 1)
    before = weights(specimen.model)
    weight = specimen.model.vit.layers[0].mlp.fc1.weight
    state.state[weight]["row_means"] = torch.zeros(weight.shape[0])
    with pytest.raises(UnsupportedModuleError, match="row_means"):
        apply(shuffle(specimen), specimen.model, state)
    assert all(torch.equal(p, before[n]) for n, p in specimen.model.named_parameters())


def test_the_temporary_is_no_larger_than_the_largest_tensor() -> None:
    specimen = FAMILIES["gpt2"]()
    permutation = shuffle(specimen)
    largest = max(p.numel() * p.element_size() for p in specimen.model.parameters())
    with torch.profiler.profile(profile_memory=True) as profile:
        apply(permutation, specimen.model)
    live = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    assert 0 < peak <= largest
