"""Noise and shuffle are rehearsed on tensors of their own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from shuffled_dpsgd.permutation import Permutation, apply_to_tensors, discover, identity
from shuffled_dpsgd.training import rehearsal
from training.cases import make_bert

CPU = torch.device("cpu")


@pytest.fixture
def works(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], object]]:
    """Rehearsals as if there were something to compile, kept instead of run."""
    found: list[Callable[[], object]] = []

    def add(topic: object, work: Callable[[], object], device: torch.device, **_: object) -> None:
        found.append(work)

    monkeypatch.setattr(rehearsal, "may_rehearse", lambda device: True)
    monkeypatch.setattr(rehearsal, "triton_available", lambda: True)
    monkeypatch.setattr(rehearsal, "_begun", set())
    monkeypatch.setattr(rehearsal.REHEARSALS, "add", add)
    return found


def parameters_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters())


def test_a_shuffle_is_rehearsed_on_copies(works: list[Callable[[], object]]) -> None:
    model = make_bert()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    spec = discover(model, scope="full")
    rehearsal.rehearse_release(spec, parameters_of(model), CPU)
    *noises, shuffle = works
    assert len(noises) == len(rehearsal._STRETCHES)
    state = torch.get_rng_state()
    shuffle()
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_an_announced_shuffle_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even in the tables of the spec: nothing was launched, and recordings trust in it."""
    model = make_bert()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    spec = discover(model, scope="full")
    here = identity(spec).packed
    moved: list[bool] = []

    def apply(permutation: Permutation, tensors: dict[str, torch.Tensor]) -> None:
        moved.append(torch.equal(permutation.packed, here) and permutation.spec is not spec)
        apply_to_tensors(permutation, tensors)

    monkeypatch.setattr(rehearsal, "apply_to_tensors", apply)
    tables, state = set(spec.derived), torch.get_rng_state()
    rehearsal._announce_shuffle(spec, parameters_of(model), CPU)
    assert moved == [True]
    assert set(spec.derived) == tables
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_a_second_run_of_the_same_shapes_rehearses_nothing(
    works: list[Callable[[], object]],
) -> None:
    model = make_bert()
    spec = discover(model, scope="full")
    for _ in range(2):
        rehearsal.rehearse_release(spec, parameters_of(model), CPU)
    assert len(works) == len(rehearsal._STRETCHES) + 1


def test_without_a_shuffle_only_noise_is_rehearsed(works: list[Callable[[], object]]) -> None:
    rehearsal.rehearse_release(None, parameters_of(nn.Linear(2, 2)), CPU)
    assert len(works) == len(rehearsal._STRETCHES)
