"""Memory of cleared sums is used again only while nobody holds the tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shuffled_dpsgd.clipping.settle import reused_memory
from shuffled_dpsgd.clipping.settle.reused_memory import ReusableBuffer
from shuffled_dpsgd.clipping.settle.totals import Totals


def parameters() -> dict[str, nn.Parameter]:
    shapes = {"odd": (3,), "matrix": (8, 16), "wide": (64, 2), "scalar": ()}
    return {name: nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()}


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
