"""How far a reader has to walk: calls from module to module in a step, and parts of an engine."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import shuffled_dpsgd
from clipping.tiny_models import bert_classifier
from shuffled_dpsgd import make_private
from shuffled_dpsgd.clipping import ClippingEngine

SOURCES = str(Path(shuffled_dpsgd.__file__).parent)
ERRORS = str(Path(SOURCES) / "errors.py")
MOST_HOPS, MOST_PARTS = 400, 8


def is_ours(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(SOURCES)


class Hops:
    """Counts calls of our functions by others than those of the same module.

    Those of `errors.py` are not counted: a reader passes over what is refused.
    """

    def __init__(self) -> None:
        self.counted: Counter[str] = Counter()

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        if event != "call" or not is_ours(frame) or frame.f_code.co_filename == ERRORS:
            return
        caller = frame.f_back
        while caller is not None and not is_ours(caller):
            caller = caller.f_back
        if caller is None or caller.f_code.co_filename != frame.f_code.co_filename:
            self.counted[f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_name}"] += 1


@pytest.mark.filterwarnings("ignore")
def test_a_usual_step_makes_few_hops_between_modules() -> None:
    """Drawing a batch, forward, backward and step of a tiny BERT, under the default settings."""
    torch.manual_seed(0)
    case = bert_classifier()
    records = [
        {name: tensor[i % 4] for name, tensor in case.inputs.items()} | {"row": torch.tensor(i)}
        for i in range(200)
    ]
    private = make_private(
        case.model,
        torch.optim.AdamW(case.model.parameters()),
        dataset_size=len(records),
        expected_batch_size=4,
        num_steps=16,
        delta=1e-5,
        noise_multiplier=1.0,
        accounting="certified",
        physical_batch_size=64,
        seed=0,
    )
    assert private.plan.shuffle == "every-step"
    hops: list[Counter[str]] = []
    before, batches = sys.getprofile(), iter(private.batches(records))
    for _ in range(16):
        hop = Hops()
        sys.setprofile(hop)
        try:
            batch = next(batches)
            batch.pop("row")
            private.backward(case.losses(case.model, batch))
            private.step()
        finally:
            sys.setprofile(before)
        hops.append(hop.counted)
    usual = sorted(hops, key=Counter.total)[len(hops) // 2]
    assert usual.total() > 200, "nothing was counted"
    assert usual.total() <= MOST_HOPS, usual.most_common(40)


def test_an_engine_has_few_parts() -> None:
    engine = ClippingEngine(bert_classifier().model)
    parts = {
        type(part).__name__
        for part in vars(engine).values()
        if type(part).__module__.startswith("shuffled_dpsgd.")
    }
    assert len(parts) <= MOST_PARTS, sorted(parts)
