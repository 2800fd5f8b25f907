"""`ShuffledDPTrainer` under a launcher: one run, the same weights."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from distributed.launching import Launcher, free_port

HERE = "distributed.trainer"
TESTS = Path(__file__).parents[1]


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


@pytest.mark.slow
def test_workers_load_for_ranks_of_which_some_have_nothing(
    launcher: Launcher, tmp_path: Path
) -> None:
    """A rank with an empty part takes the step when the others do, not while it looks ahead."""
    small = {"batch_size": 2, "gradient_accumulation_steps": 1, "max_steps": 7}
    (expected,) = launcher.run(HERE, "trained", ranks=1, directory=str(tmp_path / "1"), **small)
    found = launcher.run(
        HERE, "trained", directory=str(tmp_path / "2"), dataloader_num_workers=1, **small
    )
    assert min(expected["drawn"]) < 2, "every rank has a record in every step"
    for one in found:
        assert one["steps"] == one["spent"] == expected["steps"] == 7
        assert one["evaluated"] == pytest.approx(expected["evaluated"], rel=1e-6)
        for name, tensor in expected["weights"].items():
            assert torch.allclose(one["weights"][name], tensor, rtol=1e-9, atol=1e-9)


def started(folder: Path, *launcher: str) -> dict[str, Any]:
    """What rank 0 of `accelerated.py` found."""
    folder.mkdir()
    paths = [str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, *launcher, str(TESTS / "distributed" / "accelerated.py"), str(folder)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = torch.load(folder / "rank-0.pt", weights_only=False)
    return found


@pytest.mark.slow
def test_accelerate_launch_starts_one_run(tmp_path: Path) -> None:
    """A loop of one's own and the Trainer, in two processes and in one: the same weights."""
    alone = started(tmp_path / "alone")
    both = started(
        tmp_path / "both",
        *("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"),
        *("--main_process_port", str(free_port())),
    )
    assert (alone["loop"]["processes"], both["loop"]["processes"]) == (1, 2)
    for part in ("loop", "trainer"):
        assert both[part]["spent"] == alone[part]["spent"]
        for name, tensor in alone[part]["weights"].items():
            assert torch.allclose(both[part]["weights"][name], tensor, rtol=1e-9, atol=1e-9)
    assert "got DistributedDataParallel" in both["loop"]["model prepared"]
    assert "leave model, optimizer and data out" in both["loop"]["optimizer prepared"]
