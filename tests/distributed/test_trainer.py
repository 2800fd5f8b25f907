"""`ShuffledDPTrainer` under a launcher: one run, the same weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from distributed.launching import Launcher

HERE = "distributed.trainer"


@pytest.mark.slow
def test_two_ranks_train_what_one_trains(launcher: Launcher, tmp_path: Path) -> None:
    """The logical batch is that of all ranks together; rank 0 writes; evaluation is shared."""
    alone, both = tmp_path / "alone", tmp_path / "both"
    (expected,) = launcher.run(HERE, "trained", ranks=1, directory=str(alone))
    found = launcher.run(HERE, "trained", ranks=2, directory=str(both))
    for one in found:
        assert one["steps"] == one["spent"] == expected["steps"] == 6
        assert one["expected"] == expected["expected"] == 8
        assert one["evaluated"] == pytest.approx(expected["evaluated"], rel=1e-6)
        for name, tensor in expected["weights"].items():
            assert torch.allclose(one["weights"][name], tensor, rtol=1e-9, atol=1e-9)
    assert (both / "privacy_card.json").exists()
    assert (both / "checkpoint-6").exists()
