"""The models written by hand are clipped exactly; busy time counts no moment twice."""

from __future__ import annotations

import pytest
import torch
from benchmarks.measure import busy_time
from benchmarks.table import Table
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


def test_busy_time_counts_overlaps_once_and_nothing_but_work() -> None:
    spans = [("kernel", 0, 10), ("gpu_memcpy", 5, 10), ("kernel", 6, 2), ("kernel", 30, 1)]
    events = [{"cat": cat, "ts": begin, "dur": length} for cat, begin, length in spans]
    events += [{"cat": "gpu_user_annotation", "ts": 0, "dur": 100}, {"ph": "M"}]
    assert busy_time(events) == 16


def test_ratios_by_the_time_of_cores_stay_within_a_run() -> None:
    def entry(run: str, adapter: str, cores: list[float]) -> dict[str, object]:
        return {"run": run, "workload": "w", "adapter": adapter, "error": None,
                "block_seconds": [1.0], "core_seconds": cores,
                "round_ratios": {"plain": [1.0]}}  # fmt: skip

    old = entry("0", "plain", [100.0])
    del old["core_seconds"]
    table = Table([old, entry("1", "plain", [3.0, 4.0]), entry("1", "ours", [4.0, 8.0])])
    assert table.core_ratios("w", "ours", "plain") == [0.75, 0.5]
    assert Table([old]).core_ratios("w", "plain", "plain") == []
