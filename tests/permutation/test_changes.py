"""A shuffle moves the tensors that model and optimizer hold at that moment, or refuses."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from shuffled_dpsgd.errors import InvalidArgumentError
from shuffled_dpsgd.permutation import PermutationSpec, apply, discover, draw

Held = tuple[PermutationSpec, nn.Sequential, torch.optim.AdamW]


@pytest.fixture
def held() -> Held:
    """A model in training, shuffled once."""
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    spec = discover(model, scope="full")
    shuffle(spec, model, optimizer)
    return spec, model, optimizer


def shuffle(
    spec: PermutationSpec, model: nn.Module, optimizer: torch.optim.Optimizer | None
) -> None:
    apply(draw(spec, torch.Generator().manual_seed(1)), model, optimizer)


def moving(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Weights, gradients and moments, copied."""
    found = {}
    for name, parameter in model.named_parameters():
        found[name] = parameter.detach().clone()
        if parameter.grad is not None:
            found[f"{name} grad"] = parameter.grad.clone()
        for key, value in optimizer.state.get(parameter, {}).items():
            if value.shape == parameter.shape:
                found[f"{name} {key}"] = value.clone()
    return found


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
def test_what_is_held_now_is_moved(
    held: Held, change: Callable[[nn.Sequential, torch.optim.AdamW], None]
) -> None:
    spec, model, optimizer = held
    change(model, optimizer)
    before, function = moving(model, optimizer), model(torch.ones(1, 4).to(model[0].weight.dtype))
    permutation = draw(spec, torch.Generator().manual_seed(2))
    apply(permutation, model, optimizer)
    after = moving(model, optimizer)
    assert after.keys() == before.keys()
    for what, expected in before.items():
        for axis, layout in spec.axes_of.get(what.split()[0], ()):
            expected = expected.index_select(axis, permutation.indices[layout])
        assert torch.equal(after[what], expected), what
    again = model(torch.ones(1, 4).to(model[0].weight.dtype))
    torch.testing.assert_close(again, function)


@pytest.mark.parametrize("shape", [(2, 8), (16,)])
def test_another_shape_of_the_same_memory_is_refused(held: Held, shape: tuple[int, ...]) -> None:
    held[1][0].weight.data = held[1][0].weight.data.view(shape)
    with pytest.raises(InvalidArgumentError, match="call discover on this model"):
        shuffle(*held)


def test_a_parameter_more_or_less_is_refused(held: Held) -> None:
    _, model, _ = held
    model[1].register_parameter("slope", nn.Parameter(torch.ones(1)))
    with pytest.raises(InvalidArgumentError, match="call discover on this model"):
        shuffle(*held)
    del model[1].slope
    shuffle(*held)
    model[2].register_parameter("bias", None)
    with pytest.raises(InvalidArgumentError, match="call discover on this model"):
        shuffle(*held)


def test_an_optimizer_whose_parameters_were_replaced_is_refused(held: Held) -> None:
    spec, model, optimizer = held
    with pytest.raises(InvalidArgumentError, match="optimizer"):
        shuffle(spec, copy.deepcopy(model), optimizer)
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    with pytest.raises(InvalidArgumentError, match="optimizer"):
        shuffle(*held)
