"""Half-precision copies: the parameters' values, where they lie, and when they are overwritten."""

from __future__ import annotations

import torch
from torch import nn

from shuffled_dpsgd.clipping import ClippingEngine
from shuffled_dpsgd.clipping.rules.half_copies import HalfCopies
from shuffled_dpsgd.clipping.rules.linear import LinearSlot


def linear_slots(model: nn.Module) -> list[LinearSlot]:
    return [slot for slot in ClippingEngine(model)._slots if isinstance(slot, LinearSlot)]


def test_half_copies_are_the_parameters_rounded_and_padded_with_zeros() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4100))
    head = model[1]
    assert isinstance(head, nn.Linear)
    copies = HalfCopies(linear_slots(model)).make(torch.bfloat16, reuse=True)
    for parameter in model.parameters():
        copy = copies[id(parameter)]
        assert torch.equal(copy[: len(parameter)], parameter.detach().bfloat16())
        assert not copy.requires_grad
    assert copies[id(head.weight)].shape == (4224, 16)
    assert int(copies[id(head.weight)][4100:].count_nonzero()) == 0
    assert int(copies[id(head.bias)][4100:].count_nonzero()) == 0


def test_half_copies_follow_the_parameters_and_are_reused_only_when_told() -> None:
    model = nn.Linear(8, 16)
    halves = HalfCopies(linear_slots(model))
    first = halves.make(torch.bfloat16, reuse=True)[id(model.weight)]
    with torch.no_grad():
        model.weight.add_(1.0)
    other = halves.make(torch.bfloat16, reuse=False)[id(model.weight)]
    assert other.data_ptr() != first.data_ptr()
    with torch.no_grad():
        model.weight.add_(1.0)
    again = halves.make(torch.bfloat16, reuse=True)[id(model.weight)]
    assert again.data_ptr() == other.data_ptr()
    assert torch.equal(again, model.weight.detach().bfloat16())
