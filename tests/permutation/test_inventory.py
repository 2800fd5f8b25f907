"""An inventory is used again only while it is what a new one would be."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn

from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.permutation import PermutationSpec, apply, discover, draw
from shuffled_dpsgd.permutation.inventory import take_inventory

Held = tuple[PermutationSpec, nn.Sequential, torch.optim.AdamW]


@pytest.fixture
def held() -> Held:
    """A model in training."""
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return discover(model, scope="full"), model, optimizer


def test_an_unchanged_model_is_looked_at_once(held: Held) -> None:
    first = take_inventory(*held)
    held[1](torch.ones(1, 4)).sum().backward()
    held[2].step()
    held[2].zero_grad()
    assert take_inventory(*held) is first
    assert take_inventory(held[0], held[1], None) is not first


def _swap_data(model: nn.Sequential, optimizer: torch.optim.AdamW) -> None:
    model[0].weight.data = model[0].weight.data.clone()


def _transpose_in_place(model: nn.Sequential, optimizer: torch.optim.AdamW) -> None:
    model[0].weight.data = model[0].weight.data.T


def _swap_parameter(model: nn.Sequential, optimizer: torch.optim.AdamW) -> None:
    model[0].weight = nn.Parameter(model[0].weight.detach())


def _swap_module(model: nn.Sequential, optimizer: torch.optim.AdamW) -> None:
    model[2] = nn.Linear(4, 4)


def _load_state(model: nn.Sequential, optimizer: torch.optim.AdamW) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def _give_gradient(model: nn.Sequential, optimizer: torch.optim.AdamW) -> None:
    model[0].weight.grad = torch.ones(4, 4)


def _swap_one_moment(model: nn.Sequential, optimizer: torch.optim.AdamW) -> None:
    state = optimizer.state[model[0].weight]
    state["exp_avg_sq"] = state["exp_avg_sq"].clone()


def _swap_data_of_a_moment(model: nn.Sequential, optimizer: torch.optim.AdamW) -> None:
    moment = optimizer.state[model[0].weight]["exp_avg"]
    moment.data = moment.data.clone()


def _transpose_a_moment(model: nn.Sequential, optimizer: torch.optim.AdamW) -> None:
    optimizer.state[model[0].weight]["exp_avg"].t_()


def _retype_a_moment(model: nn.Sequential, optimizer: torch.optim.AdamW) -> None:
    """Another dtype at the same address, as freed memory that is used again may bring about."""
    moment = optimizer.state[model[0].weight]["exp_avg"]
    moment.data = moment.data.view(torch.int32)


def _drop_a_state(model: nn.Sequential, optimizer: torch.optim.AdamW) -> None:
    del optimizer.state[model[0].weight]


def _add_state(model: nn.Sequential, optimizer: torch.optim.AdamW) -> None:
    optimizer.state[model[0].weight]["max_exp_avg_sq"] = torch.ones(4, 4)


def _change_dtype(model: nn.Sequential, optimizer: torch.optim.AdamW) -> None:
    model.to(torch.float64)


def _replace_parameters_wholesale(model: nn.Sequential, optimizer: torch.optim.AdamW) -> None:
    model[0]._parameters = {n: nn.Parameter(p.detach()) for n, p in model[0].named_parameters()}


CHANGES = [
    _swap_data,
    _transpose_in_place,
    _swap_parameter,
    _swap_module,
    _load_state,
    _give_gradient,
    _swap_one_moment,
    _swap_data_of_a_moment,
    _transpose_a_moment,
    _retype_a_moment,
    _drop_a_state,
    _add_state,
    _change_dtype,
    _replace_parameters_wholesale,
]


@pytest.mark.parametrize("change", CHANGES)
def test_any_change_is_seen(
    held: Held, change: Callable[[nn.Sequential, torch.optim.AdamW], None]
) -> None:
    first = take_inventory(*held)
    assert take_inventory(*held) is first
    change(*held[1:])
    assert take_inventory(*held) is not first


@pytest.mark.parametrize("shape", [(2, 8), (16,)])
def test_another_shape_of_the_same_memory_is_refused(held: Held, shape: tuple[int, ...]) -> None:
    take_inventory(*held)
    held[1][0].weight.data = held[1][0].weight.data.view(shape)
    with pytest.raises(InvalidArgumentError, match="call discover on this model"):
        take_inventory(*held)


def test_a_parameter_more_or_less_is_refused(held: Held) -> None:
    spec, model, optimizer = held
    take_inventory(*held)
    model[1].register_parameter("slope", nn.Parameter(torch.ones(1)))
    with pytest.raises(InvalidArgumentError, match="call discover on this model"):
        take_inventory(spec, model, optimizer)
    del model[1].slope
    take_inventory(*held)
    model[2].register_parameter("bias", None)
    with pytest.raises(InvalidArgumentError, match="call discover on this model"):
        take_inventory(spec, model, optimizer)


def test_another_model_or_optimizer_has_its_own_inventory(held: Held) -> None:
    spec, model, optimizer = held
    first = take_inventory(spec, model, optimizer)
    assert take_inventory(spec, copy.deepcopy(model), None) is not first
    assert take_inventory(spec, model, torch.optim.SGD(model.parameters())) is not first


def test_an_optimizer_whose_parameters_were_replaced_is_refused(held: Held) -> None:
    spec, model, optimizer = held
    take_inventory(*held)
    with pytest.raises(InvalidArgumentError, match="optimizer"):
        take_inventory(spec, copy.deepcopy(model), optimizer)
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    with pytest.raises(InvalidArgumentError, match="optimizer"):
        take_inventory(*held)


def test_a_model_is_not_kept_alive() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))
    spec = discover(model, scope="full")
    optimizer = torch.optim.SGD(model.parameters())
    take_inventory(spec, model, None)
    take_inventory(spec, model, optimizer)
    watched = weakref.ref(model)
    del model
    gc.collect()
    assert watched() is None


def test_gradients_are_never_kept(held: Held) -> None:
    _give_gradient(*held[1:])
    gradient = weakref.ref(held[1][0].weight.grad)
    take_inventory(*held)
    held[2].zero_grad()
    gc.collect()
    assert gradient() is None


def test_state_is_freed_with_its_optimizer(held: Held) -> None:
    spec, model, _ = held
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    take_inventory(spec, model, optimizer)
    momentum = weakref.ref(optimizer.state[model[0].weight]["momentum_buffer"])
    del optimizer
    gc.collect()
    assert momentum() is None


def test_replaced_state_is_let_go(held: Held) -> None:
    _, model, optimizer = held
    take_inventory(*held)
    moment = weakref.ref(optimizer.state[model[0].weight]["exp_avg"])
    _load_state(model, optimizer)
    _give_gradient(model, optimizer)
    take_inventory(*held)
    gc.collect()
    assert moment() is None


def test_a_copied_spec_starts_empty(held: Held) -> None:
    first = take_inventory(*held)
    again = copy.deepcopy(held[0])
    assert again == held[0]
    assert take_inventory(again, *held[1:]) is not first


def test_shuffles_from_one_inventory_keep_the_function(held: Held) -> None:
    spec, model, optimizer = held
    before = model(torch.ones(1, 4))
    first = take_inventory(*held)
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        apply(draw(spec, generator), model, optimizer)
        assert torch.allclose(model(torch.ones(1, 4)), before)
    assert take_inventory(*held) is first
