"""Where sums lie in memory, and who may still hold them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shuffled_dpsgd.clipping import ClippingEngine
from shuffled_dpsgd.clipping.finalize import totals
from shuffled_dpsgd.clipping.finalize.totals import Totals


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
    assert len({id(total._base) for total in totals.sums.values()}) == 1


def test_steps_with_sums_in_one_buffer_give_the_same_sums(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on an accelerator."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    batches = [torch.randn(6, 5) for _ in range(4)]

    def steps() -> list[dict[str, Tensor]]:
        engine = ClippingEngine(model, clip_norm=0.1)
        found = []
        for x in batches:
            for half in x.split(3):
                with engine:
                    engine.backward(model(half).square().sum(1))
            found.append(engine.clipped_sum())
            engine.reset()
        return found

    expected = steps()
    monkeypatch.setattr("shuffled_dpsgd.clipping.finalize.totals.lie_apart", lambda device: False)
    for one, other in zip(steps(), expected, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_sums_on_two_devices_are_made_anew() -> None:
    owned = parameters()
    owned["far"] = nn.Parameter(torch.zeros(4, 4, device="meta"))
    totals = Totals(owned)
    for _ in range(3):
        assert {name: total.device for name, total in totals.sums.items()} == {
            name: parameter.device for name, parameter in owned.items()
        }
        totals.clear()


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
    make = totals.new_memory

    def full_of_nan(shape: torch.Size, zero: bool, options: Any) -> Tensor:
        return make(shape, zero, options).fill_(0.0 if zero else float("nan"))

    model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 2), nn.Linear(2, 2))
    model.unused = nn.Linear(3, 3)
    x = torch.randn(5, 3, 4)
    monkeypatch.setattr(totals, "new_memory", full_of_nan)
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


def test_an_engine_reads_its_norms() -> None:
    engine = ClippingEngine(nn.Linear(3, 2), clip_norm=1.0)
    for size in (2, 3):
        with engine:
            engine.backward(engine.model(torch.randn(size, 3)).square().sum(1))
    found, other = engine.read_norms(torch.tensor(1.5))
    assert torch.equal(found, engine.sample_norms)
    assert (len(found), other.item()) == (5, 1.5)
