"""The models written by hand are clipped exactly."""

from __future__ import annotations

import pytest
import torch
from benchmarks.workloads import SUITES, Workload, own_gpt, own_vit, workload
from torch import nn

from clipping.compare import assert_exact

TINY = {"width": 12, "depth": 1, "heads": 3}


@pytest.mark.parametrize("family", ["vit", "gpt2"])
def test_models_written_by_hand_are_clipped_exactly(family: str) -> None:
    def build() -> nn.Module:
        return own_vit(5, **TINY) if family == "vit" else own_gpt(5, vocabulary=1000, **TINY)

    torch.manual_seed(0)
    tiny = Workload(name="tiny", family=family, batch_size=3, length=5, build=build)
    batch = tiny.batch(torch.device("cpu"))
    wide = {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}
    assert_exact(tiny.build().double().eval(), tiny.losses, wide, clip_norm=0.1)


def test_the_suite_names_both_at_their_size() -> None:
    assert [workload(name).batch_size for name in SUITES["own"]] == [128, 32]
