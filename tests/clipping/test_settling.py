"""Where sums and half-precision copies lie in memory, and who may still hold them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from shuffled_dpsgd.clipping import ClippingEngine, cost
from shuffled_dpsgd.clipping.half import HalfCopies
from shuffled_dpsgd.clipping.rules.linear import LinearSlot
from shuffled_dpsgd.clipping.totals import Totals


def parameters() -> dict[str, nn.Parameter]:
    shapes = {"odd": (3,), "matrix": (8, 16), "wide": (64, 2), "scalar": ()}
    return {name: nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()}


def test_sums_share_memory_without_overlap_and_whole_blocks_are_aligned() -> None:
    owned = parameters()
    sums = Totals(owned).sums
    assert list(sums) == list(owned)
    assert len({total.untyped_storage().data_ptr() for total in sums.values()}) == 1
    for index, (name, total) in enumerate(sums.items()):
        assert total.shape == owned[name].shape
        total.fill_(index + 1)
    assert [float(total.max()) for total in sums.values()] == [1, 2, 3, 4]
    for name in ("matrix", "wide"):
        assert sums[name].data_ptr() % 16 == 0


def test_sums_handed_out_survive_a_reset() -> None:
    totals = Totals(parameters())
    kept = totals.sums["matrix"]
    kept.fill_(5.0)
    totals.clear()
    assert float(totals.sums["matrix"].abs().max()) == 0.0
    assert float(kept.min()) == 5.0


def test_double_parameters_have_double_sums() -> None:
    owned = {**parameters(), "double": nn.Parameter(torch.randn(4, dtype=torch.float64))}
    sums = Totals(owned).sums
    assert sums["double"].dtype == torch.float64
    assert sums["odd"].dtype == torch.float32


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


@pytest.mark.parametrize("route", [cost.Route.GRAM, cost.Route.TILES])
def test_layers_settled_together_by_either_route_agree_with_stored_gradients(
    route: cost.Route, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6, bias=False), nn.Tanh(), nn.Linear(6, 4)]
    model = nn.Sequential(*layers, nn.Linear(4, 6), nn.Linear(6, 6)).double()
    x = torch.randn(3, 5, 6, dtype=torch.float64)

    def clipped(strategy: str) -> tuple[Tensor, dict[str, Tensor]]:
        engine = ClippingEngine(model, clip_norm=0.1, strategy=strategy)
        with engine:
            engine.backward(model(x).square().sum((1, 2)))
        return engine.sample_norms, engine.clipped_sum()

    expected_norms, expected = clipped("instantiate")
    monkeypatch.setitem(cost.STRATEGIES, "bookkeeping", lambda T, R, C, device: route)
    norms, sums = clipped("bookkeeping")
    torch.testing.assert_close(norms, expected_norms)
    for name, total in sums.items():
        torch.testing.assert_close(total, expected[name])
