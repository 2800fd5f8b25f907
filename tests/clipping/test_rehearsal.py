"""Settling is rehearsed with stand-ins, and nobody but the compiler notices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shuffled_dpsgd.clipping import ClippingEngine, kernels, rehearsal
from shuffled_dpsgd.clipping.checks.input_growth import Given
from shuffled_dpsgd.clipping.kernels import choices

CPU = torch.device("cpu")


class Tagger(nn.Module):
    """Every kind of layer that is rehearsed; the head is tied to the table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 8)
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 12)
        self.conv = nn.Conv1d(12, 8, 1)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.up(self.norm(self.table(ids)))
        return self.head(self.conv(hidden.mT).mT)


@pytest.fixture
def works(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], object]]:
    """Rehearsals as if there were something to compile, kept instead of run."""
    found: list[Callable[[], object]] = []

    def add(topic: object, work: Callable[[], object], device: torch.device, **_: object) -> None:
        found.append(work)

    monkeypatch.setattr(rehearsal, "may_rehearse", lambda device: True)
    monkeypatch.setattr(rehearsal, "_begun", set())
    monkeypatch.setattr(rehearsal.REHEARSALS, "add", add)
    return found


def losses_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return model(ids).square().mean((1, 2))


def test_a_rehearsal_calls_what_settling_calls(
    works: list[Callable[[], object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[tuple[str, Any]] = []

    def watch(name: str, primitive: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            called.append((name, shapes_in(args)))
            return primitive(*args, **kwargs)

        return watched

    names = ("add_weighted_outer_sums", "tied_cross_terms", "norm_sum_runs")
    for name in (*names, "weighted_embedding_sum"):
        monkeypatch.setattr(kernels, name, watch(name, getattr(kernels, name)))
    model = Tagger()
    with ClippingEngine(model) as engine:
        engine.backward(losses_of(model, torch.arange(10).view(2, 5)))
        real = set(called)
        called.clear()
        for work in works:
            work()
        assert set(called) >= real


def shapes_in(args: tuple[Any, ...]) -> Any:
    """The shapes of pairs of tensors that a primitive is given first."""
    first = args[0]
    return tuple(tuple(t.shape for t in pair) for pair in first) if isinstance(first, list) else ()


def test_a_rehearsal_changes_neither_sums_nor_slots(works: list[Callable[[], object]]) -> None:
    model, ids = Tagger(), torch.arange(10).view(2, 5)
    with ClippingEngine(model) as engine:
        engine.expect_lengths([9])
        engine.backward(losses_of(model, ids))
        before = {name: total.clone() for name, total in engine.clipped_sum().items()}
        plan, norms = str(engine.plan()), engine.sample_norms.clone()
        assert len(works) == 8
        for work in works:
            work()
        assert str(engine.plan()) == plan
        assert torch.equal(engine.sample_norms, norms)
        for name, total in engine.clipped_sum().items():
            assert torch.equal(total, before[name])
    assert all(parameter.grad is None for parameter in model.parameters())


class Tied(nn.Module):
    """A head that is its table, too; `widest` of it all is the number of words."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 8)
        self.head = nn.Linear(8, 50, bias=False)
        self.head.weight = self.table.weight


@pytest.mark.parametrize(
    ("model", "needs"),
    [
        (nn.Linear(3, 7), {"widest": 7}),
        (nn.LayerNorm(5), {"norm_layers": True}),
        (nn.RMSNorm(5), {"norm_layers": True}),
        (nn.Embedding(50, 8), {"tables": True}),
        (Tied(), {"tables": True, "tied_tables": True, "widest": 50}),
        (nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 9)), {"tables": True, "widest": 9}),
        (nn.Conv2d(3, 6, 5), {"widest": 6}),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_trials_are_those_that_the_layers_ask_for(
    model: nn.Module, needs: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[choices.LayerNeeds] = []
    monkeypatch.setattr(rehearsal, "may_rehearse", lambda device: True)
    monkeypatch.setattr(choices, "try_ahead", lambda device, needs: found.append(needs))
    ClippingEngine(model)
    none = {"widest": 0, "norm_layers": False, "tables": False, "tied_tables": False}
    assert found == [choices.LayerNeeds(**{**none, **needs})]


def test_lengths_that_come_later_are_not_urgent(
    works: list[Callable[[], object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    urgent: list[bool] = []

    def add(*_: object, is_urgent: bool, **__: object) -> None:
        urgent.append(is_urgent)

    monkeypatch.setattr(rehearsal.REHEARSALS, "add", add)
    model, ids = Tagger(), torch.arange(10).view(2, 5)
    with ClippingEngine(model) as engine:
        engine.expect_lengths([5, 200])
        engine.backward(losses_of(model, ids))
    assert urgent == sorted(urgent, reverse=True)
    assert True in urgent
    assert False in urgent


def test_layers_of_one_kind_are_rehearsed_once(works: list[Callable[[], object]]) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8, bias=False))
    with ClippingEngine(model):
        model(torch.randn(3, 4, 8))
    assert len(works) == 4  # Norms and sums of layers with and without a bias.
    with ClippingEngine(model):
        model(torch.randn(3, 4, 8))
    assert len(works) == 4


def test_sums_that_take_much_memory_are_not_rehearsed(
    works: list[Callable[[], object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rehearsal, "MOST_NUMBERS", 71)
    model = nn.Linear(8, 8)
    with ClippingEngine(model):
        model(torch.randn(3, 4, 8))
    assert not works


def test_autocast_lowers_products_and_pads_a_head(works: list[Callable[[], object]]) -> None:
    head = nn.Linear(8, 5000)
    with ClippingEngine(head) as engine:
        slot = engine._slots[0]
    call = rehearsal.Call(slot=slot, shape=(4, 8), dtype=torch.float32)
    capture = rehearsal._entry(call, CPU, torch.bfloat16).capture
    x, g = capture.tensors()
    assert (x.dtype, g.dtype) == (torch.bfloat16, torch.bfloat16)
    assert g.shape == (2, 4, 5000)
    assert g.stride(1) == 5120
    assert not works


def test_without_anything_to_compile_nothing_is_rehearsed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rehearsal, "_begun", set())
    model = nn.Linear(3, 2)
    engine = ClippingEngine(model)
    engine._rehearsal.begin({0: [Given(2, (2, 3), torch.float32)]})
    assert not rehearsal._begun
