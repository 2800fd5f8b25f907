"""Every capture names all the tensors it holds."""

from __future__ import annotations

from dataclasses import fields

import pytest
from torch import Tensor

from clipping.tiny_models import CASES
from shuffled_dpsgd.clipping import ClippingEngine
from shuffled_dpsgd.clipping.capture.batch import CapturedBatch
from shuffled_dpsgd.clipping.capture.captures import Capture
from shuffled_dpsgd.clipping.contributions import cost
from shuffled_dpsgd.clipping.settle.schedules import WholeGradient


@pytest.mark.parametrize("name", sorted(CASES))
def test_captures_of_real_models_name_all_their_tensors(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[name]()
    captures: list[Capture] = []
    settle = WholeGradient.finish

    def finish(schedule: WholeGradient, batch: CapturedBatch) -> None:
        captures.extend(entry.capture for entry in batch.settling.all_entries())
        settle(schedule, batch)

    monkeypatch.setattr(WholeGradient, "finish", finish)
    with ClippingEngine(case.model) as engine:
        engine.backward(case.losses(case.model, case.inputs))
    assert captures
    for capture in captures:
        held = [getattr(capture, field.name) for field in fields(capture)]  # type: ignore[arg-type]
        tensors = [value for value in held if isinstance(value, Tensor)]
        assert [*map(id, capture.tensors())] == [*map(id, tensors)]
        assert {type(value) for value in held} <= {Tensor, type(None), int, float, cost.NormMethod}
