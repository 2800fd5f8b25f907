"""That a result does not depend on the number of ranks, or on what each of them holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch

MODELS = ["bert", "gpt2", "vit"]
NAMES = [*MODELS, *[f"{name} without noise" for name in MODELS]]


def assert_all_same(found: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    """Weights, moments, norms and metrics of every rank beside those of one process."""
    for case in found[0]:
        expected = alone[case]
        for one in found:
            for name, tensor in expected["weights"].items():
                assert torch.allclose(one[case]["weights"][name], tensor, rtol=1e-9, atol=1e-9)
                assert torch.equal(one[case]["weights"][name], found[0][case]["weights"][name])
            assert torch.allclose(one[case]["norms"], expected["norms"], rtol=1e-9)
            assert one[case]["spent"] == expected["spent"] == 4
            assert one[case]["claims"] == expected["claims"]
            for mine, theirs in zip(one[case]["metrics"], expected["metrics"], strict=True):
                assert mine["batch_size"] == theirs["batch_size"]
                assert (mine["loss"] is None) == (mine["batch_size"] == 0)
                assert (mine["loss"] or 0.0) == pytest.approx(theirs["loss"] or 0.0, rel=1e-9)
                assert mine["batch_clip_factors"] == pytest.approx(theirs["batch_clip_factors"])
    moved = alone["bert"]["weights"], alone["bert without noise"]["weights"]
    assert any(not torch.allclose(moved[0][name], moved[1][name]) for name in moved[0])
    factors = [m["batch_clip_factors"]["shuffled"] for m in alone["vit"]["metrics"]]
    assert min(factors) < 1.0, "the batch clip was never at work"
