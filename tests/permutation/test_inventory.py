"""An inventory is used again only while it is what a new one would be."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from unittest import mock

import pytest
import torch
from torch import nn

from shuffled_dpsgd.permutation import PermutationSpec, apply, discover, draw, fused
from shuffled_dpsgd.permutation.inventory import take_inventory

Held = tuple[PermutationSpec, nn.Sequential, torch.optim.AdamW]


def _takes_all(*_: object) -> bool:
    return True


@pytest.fixture
def held() -> Iterator[Held]:
    """A model in training whose tensors all take the fused route, as on a GPU."""
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    with mock.patch.object(fused, "can_move", new=_takes_all):
        yield discover(model, scope="full"), model, optimizer


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


@pytest.mark.parametrize(
    "change",
    [_swap_data, _transpose_in_place, _swap_parameter, _swap_module, _load_state, _give_gradient],
)
def test_any_change_is_seen(
    held: Held, change: Callable[[nn.Sequential, torch.optim.AdamW], None]
) -> None:
    first = take_inventory(*held)
    change(*held[1:])
    assert take_inventory(*held) is not first


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


def test_plain_indexing_looks_every_time() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))
    spec = discover(model, scope="full")
    before = model(torch.ones(1, 4))
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        apply(draw(spec, generator), model)
        assert torch.allclose(model(torch.ones(1, 4)), before)
    assert take_inventory(spec, model, None) is not take_inventory(spec, model, None)
