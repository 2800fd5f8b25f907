"""Where sums and half-precision copies lie in memory, and who may still hold them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shuffled_dpsgd.clipping import ClippingEngine
from shuffled_dpsgd.clipping.contributions import cost
from shuffled_dpsgd.clipping.rules.half_copies import HalfCopies
from shuffled_dpsgd.clipping.rules.linear import LinearSlot
from shuffled_dpsgd.clipping.settle import reused_memory
from shuffled_dpsgd.clipping.settle.reused_memory import ReusableBuffer
from shuffled_dpsgd.clipping.settle.totals import Allocation, Totals


def parameters() -> dict[str, nn.Parameter]:
    shapes = {"odd": (3,), "matrix": (8, 16), "wide": (64, 2), "scalar": ()}
    return {name: nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()}


def test_sums_have_the_shapes_of_their_parameters_and_do_not_overlap() -> None:
    owned = parameters()
    sums = Totals(owned).sums
    assert list(sums) == list(owned)
    for index, (name, total) in enumerate(sums.items()):
        assert total.shape == owned[name].shape
        total.fill_(index + 1)
    assert [float(total.max()) for total in sums.values()] == [1, 2, 3, 4]


def test_sums_on_an_accelerator_share_memory_and_whole_blocks_are_aligned() -> None:
    owned = {name: nn.Parameter(p.to("meta")) for name, p in parameters().items()}
    totals = Totals(owned)
    places = {name: total.storage_offset() for name, total in totals.sums.items()}
    assert places == {"matrix": 0, "wide": 128, "odd": 256, "scalar": 259}
    assert all(total._base is totals.buffers[0] for total in totals.sums.values())


@pytest.mark.parametrize(
    "hold", ["tensor", "view", "detached", "grad", "numpy", "storage", "dlpack"]
)
def test_the_memory_of_sums_is_used_again_only_when_nobody_has_them(hold: str) -> None:
    owned = parameters()
    totals = Totals(owned)
    places = {name: total.data_ptr() for name, total in totals.sums.items()}
    kept: object = None
    if hold == "grad":
        owned["matrix"].grad = totals.sums["matrix"]
    else:
        total = totals.sums["matrix"]
        kept = {
            "tensor": lambda: total,
            "view": lambda: total.view(-1),
            "detached": lambda: total.detach()[1:],
            "numpy": total.numpy,
            "storage": total.untyped_storage,
            "dlpack": lambda: torch.utils.dlpack.to_dlpack(total),
        }[hold]()
        del total
    totals.clear()
    again = {name: total.data_ptr() for name, total in totals.sums.items()}
    assert [name for name in places if again[name] != places[name]] == ["matrix"]
    del kept
    owned["matrix"].grad = None
    totals.clear()
    assert {name: total.data_ptr() for name, total in totals.sums.items()} == again


def buffer_of(owned: dict[str, nn.Parameter]) -> ReusableBuffer:
    buffer = torch.ones(sum(p.numel() for p in owned.values()))
    views = buffer.split([p.numel() for p in owned.values()])
    parts = zip(owned.items(), views, strict=True)
    return ReusableBuffer(buffer, {name: view.view(p.shape) for (name, p), view in parts})


def test_tensors_that_nobody_has_outlive_their_memory() -> None:
    reusable = buffer_of(parameters())
    before = {name: id(total) for name, total in reusable.sums().items()}
    reusable.let_go()
    assert reusable.buffer.untyped_storage().nbytes() == 0
    assert reusable.take(zero=True)
    sums = reusable.sums()
    assert {name: id(total) for name, total in sums.items()} == before
    for index, total in enumerate(sums.values()):
        assert not total.any()
        total.fill_(index)
    assert [float(total.max()) for total in sums.values()] == [0, 1, 2, 3]


@pytest.mark.parametrize("hold", ["tensor", "all", "view", "detached", "grad", "buffer", "storage"])
def test_tensors_that_somebody_has_keep_their_memory(hold: str) -> None:
    reusable, parameter = buffer_of(parameters()), nn.Parameter(torch.zeros(8, 16))
    if hold == "grad":
        parameter.grad = reusable.sums()["matrix"]
    kept: Any = {
        "tensor": lambda: reusable.sums()["matrix"],
        "all": reusable.sums,
        "view": lambda: reusable.sums()["matrix"].view(-1),
        "detached": lambda: reusable.sums()["matrix"].detach()[1:],
        "buffer": lambda: reusable.sums()["matrix"]._base,
        "storage": lambda: reusable.sums()["matrix"].untyped_storage(),
        "grad": lambda: None,
    }[hold]()
    reusable.let_go()
    assert reusable.buffer.untyped_storage().nbytes() > 0
    assert not reusable.take(zero=True)
    assert float(reusable.buffer.min()) == 1.0
    del kept
    parameter.grad = None
    reusable.let_go()
    assert reusable.buffer.untyped_storage().nbytes() == 0


def test_sums_on_an_accelerator_are_the_same_tensors_again_if_nobody_has_them() -> None:
    totals = Totals({name: nn.Parameter(p.to("meta")) for name, p in parameters().items()})
    first = {name: id(total) for name, total in totals.sums.items()}
    totals.clear()
    assert {name: id(total) for name, total in totals.sums.items()} == first
    kept = totals.sums["matrix"]
    totals.clear()
    again = totals.sums
    assert all(again[name] is not kept for name in again)
    assert kept.untyped_storage().nbytes() > 0


@pytest.mark.parametrize("keeps", [False, True])
def test_steps_with_sums_used_again_give_the_same_sums(
    keeps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on an accelerator: one buffer, the same tensors in every step unless somebody has them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    batches = [torch.randn(6, 5) for _ in range(4)]

    def steps() -> tuple[list[dict[str, Tensor]], set[int]]:
        engine = ClippingEngine(model, clip_norm=0.1)
        kept, found, tensors = [], [], set()
        for x in batches:
            for half in x.split(3):
                with engine:
                    engine.backward(model(half).square().sum(1))
            sums = engine.clipped_sum()
            tensors.add(id(sums["0.weight"]))
            found.append({name: total.clone() for name, total in sums.items()})
            for name, parameter in model.named_parameters():
                parameter.grad = sums[name]
            model.zero_grad(set_to_none=True)
            kept += [sums] if keeps else []
            engine.reset()
            del sums
        for sums, values in zip(kept, found, strict=False):
            assert all(torch.equal(sums[name], values[name]) for name in values)
        return found, tensors

    expected, _ = steps()
    monkeypatch.setattr("shuffled_dpsgd.clipping.settle.totals.lie_apart", lambda device: False)
    found, tensors = steps()
    for one, other in zip(found, expected, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)
    assert len(tensors) == (4 if keeps else 1)


def test_sums_on_two_devices_are_made_anew() -> None:
    owned = parameters()
    owned["far"] = nn.Parameter(torch.zeros(4, 4, device="meta"))
    totals = Totals(owned)
    for _ in range(3):
        assert {name: total.device for name, total in totals.sums.items()} == {
            name: parameter.device for name, parameter in owned.items()
        }
        totals.clear()


def test_a_release_that_counts_holders_otherwise_uses_nothing_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert reused_memory.counts_are_understood()
    for answer in (True, False):
        monkeypatch.setattr(ReusableBuffer, "is_free", lambda self, answer=answer: answer)
        reused_memory.counts_are_understood.cache_clear()
        assert not reused_memory.counts_are_understood()
    totals = Totals({name: nn.Parameter(p.to("meta")) for name, p in parameters().items()})
    first = totals.sums["matrix"]
    totals.clear()
    assert totals.sums["matrix"] is not first
    monkeypatch.undo()
    reused_memory.counts_are_understood.cache_clear()


def test_sums_handed_out_survive_a_reset() -> None:
    totals = Totals(parameters())
    kept = totals.sums["matrix"]
    kept.fill_(5.0)
    totals.clear()
    assert float(totals.sums["matrix"].abs().max()) == 0.0
    assert float(kept.min()) == 5.0


def test_new_sums_are_forgotten_when_nothing_comes_to_fill_them() -> None:
    totals = Totals(parameters())

    def fail() -> None:
        with totals.adding() as (sums, new):
            assert new
            sums["matrix"].fill_(float("nan"))
            raise ValueError("no sums today")

    with pytest.raises(ValueError, match="no sums"):
        fail()
    assert all(float(total.abs().max()) == 0.0 for total in totals.sums.values())
    totals.sums["matrix"].fill_(5.0)
    with pytest.raises(AssertionError):
        fail()
    assert float(totals.sums["matrix"].min()) == 5.0


def test_what_memory_held_before_reaches_no_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    allocate = Allocation.allocate

    def full_of_nan(
        one: Allocation, *, zero: bool, **options: Any
    ) -> tuple[Any, dict[str, Tensor]]:
        buffer, sums = allocate(one, zero=zero, **options)
        for total in sums.values():
            total.fill_(0.0 if zero else float("nan"))
        return buffer, sums

    model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 2), nn.Linear(2, 2))
    model.unused = nn.Linear(3, 3)
    x = torch.randn(5, 3, 4)
    monkeypatch.setattr(Allocation, "allocate", full_of_nan)
    engine = ClippingEngine(model)
    model.forward = lambda x: model[3](model[3](model[:3](x)))  # type: ignore[method-assign]
    for _ in range(2):
        with engine:
            engine.backward(model(x).square().sum((1, 2)))
    assert all(total.isfinite().all() for total in engine.clipped_sum().values())
    assert float(engine.clipped_sum()["unused.weight"].abs().max()) == 0.0


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
    monkeypatch.setitem(cost.STRATEGIES, "bookkeeping", lambda *_: route)
    norms, sums = clipped("bookkeeping")
    torch.testing.assert_close(norms, expected_norms)
    for name, total in sums.items():
        torch.testing.assert_close(total, expected[name])
