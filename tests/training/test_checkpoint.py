"""Checkpoints: bit for bit, whole or not at all, and only of the same run."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from shuffled_dpsgd.errors import CheckpointError, InvalidArgumentError
from shuffled_dpsgd.training import (
    PrivateTraining,
    find_checkpoints,
    latest_checkpoint,
    load_checkpoint,
    make_private,
    save_checkpoint,
)
from slow_cases import one_in
from training.cases import (
    Case,
    bert_case,
    gpt2_case,
    mlp_case,
    run,
    vectors,
    weights,
)


def dropout_case() -> Case:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 10), nn.Dropout(0.3), nn.Tanh(), nn.Linear(10, 3))

    return Case(make=make, data=vectors(), loss=mlp_case().loss)


def start(case: Case, directory: Path | None = None, **changes: Any) -> PrivateTraining:
    model = case.make()
    settings: dict[str, Any] = {
        "dataset_size": len(case.data),
        "expected_batch_size": 8,
        "num_steps": 6,
        "delta": 1e-3,
        "noise_multiplier": 1.0,
        "shuffle": "off",
        "seed": 3,
        "ledger_path": None if directory is None else directory / "ledger.jsonl",
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    return make_private(model, optimizer, **(settings | changes))


RESUMABLE = {
    "dropout": (dropout_case, {}),
    "every-step": (bert_case, {"shuffle": "every-step", "batch_clip_norm": 2.0}),
    "unshuffled frame": (bert_case, {"shuffle": "every-step", "noise_frame": "unshuffled"}),
    "at-release": (bert_case, {"shuffle": "at-release", "scope": "full"}),
    # Of few samples, the last bits of a product depend on how many positions are left out of it.
    "small batches": (bert_case, {"physical_batch_size": 2}),
    "tied weights": (gpt2_case, {"shuffle": "every-step", "scope": "full"}),
}


@pytest.mark.parametrize("name", one_in(2, RESUMABLE))
def test_resume_equals_the_uninterrupted_run_bit_for_bit(tmp_path: Path, name: str) -> None:
    make_case, changes = RESUMABLE[name]
    case = make_case()
    whole = start(case, **changes)
    torch.manual_seed(11)
    run(whole, case)
    whole.release()

    first = start(case, tmp_path, **changes)
    torch.manual_seed(11)
    run(first, case, num_steps=2)
    path = save_checkpoint(first, tmp_path)
    run(first, case, num_steps=1)

    torch.manual_seed(99)
    second = start(case, tmp_path, **changes)
    load_checkpoint(second, path)
    assert second.steps_taken == 2
    assert second.ledger.spent == 3
    run(second, case)
    second.release()
    expected, found = weights(whole.model), weights(second.model)
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert second.ledger.spent == 6


def test_a_secure_run_pays_for_the_steps_a_crash_lost(tmp_path: Path) -> None:
    case = mlp_case()
    first = start(case, tmp_path, seed=None)
    run(first, case, num_steps=2)
    path = save_checkpoint(first, tmp_path)
    run(first, case, num_steps=3)
    second = start(case, tmp_path, seed=None)
    load_checkpoint(second, path)
    assert (second.steps_taken, second.ledger.spent) == (2, 5)
    run(second, case)
    assert (second.steps_taken, second.ledger.spent) == (3, 6)
    assert second.finished
    assert second.card().steps_released == 6


def drawn(private: PrivateTraining) -> list[list[int]]:
    return [private.sampler.indices(step).tolist() for step in range(5)]


def test_a_draw_belongs_to_its_step_in_another_process_too(tmp_path: Path) -> None:
    """Whoever is killed by a batch, and begins again, must not get a luckier one."""
    case = mlp_case()
    first = start(case, tmp_path, seed=None)
    run(first, case, num_steps=2)
    path = save_checkpoint(first, tmp_path)
    before = drawn(first)
    second = start(case, tmp_path, seed=None)
    load_checkpoint(second, path)
    assert drawn(second)[2:] == before[2:]
    run(second, case, num_steps=1)
    third = start(case, tmp_path, seed=None)
    load_checkpoint(third, path)
    # The update of this step was lost: it is released again, and drawn anew.
    assert drawn(third)[2] != before[2]
    assert drawn(third)[3:] == before[3:]
    assert drawn(start(case, seed=None)) != before


def test_schedulers_travel_along(tmp_path: Path) -> None:
    def with_scheduler() -> tuple[PrivateTraining, Any]:
        private = start(mlp_case())
        scheduler = torch.optim.lr_scheduler.StepLR(private.optimizer, 1, gamma=0.5)
        private.on_update(scheduler.step)
        return private, scheduler

    first, scheduler = with_scheduler()
    run(first, mlp_case(), num_steps=3)
    path = save_checkpoint(first, tmp_path, extras={"scheduler": scheduler})
    second, other = with_scheduler()
    with pytest.raises(CheckpointError, match="scheduler"):
        load_checkpoint(second, path)
    load_checkpoint(second, path, extras={"scheduler": other})
    assert other.get_last_lr() == scheduler.get_last_lr() == [0.05 * 0.5**3]


def saved(tmp_path: Path) -> Path:
    private = start(mlp_case())
    run(private, mlp_case(), num_steps=2)
    return save_checkpoint(private, tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "state.pt", "run.json", "manifest.json"])
def test_torn_checkpoints_are_refused_with_the_reason(tmp_path: Path, name: str) -> None:
    path = saved(tmp_path)
    whole = (path / name).read_bytes()
    (path / name).write_bytes(whole[: len(whole) // 2])
    fresh = start(mlp_case())
    before = weights(fresh.model)
    with pytest.raises(CheckpointError, match=name.partition(".")[0]):
        load_checkpoint(fresh, path)
    (path / name).unlink()
    with pytest.raises(CheckpointError, match=name):
        load_checkpoint(fresh, path)
    assert all(torch.equal(before[n], t) for n, t in weights(fresh.model).items())
    assert fresh.steps_taken == 0


def test_foreign_checkpoints_are_refused_with_the_reason(tmp_path: Path) -> None:
    path = saved(tmp_path)
    with pytest.raises(CheckpointError, match=r"differs in blocks"):
        load_checkpoint(start(mlp_case(), noise_multiplier=2.0), path)
    with pytest.raises(CheckpointError, match=r"differs in seed"):
        load_checkpoint(start(mlp_case(), seed=None), path)
    with pytest.raises(CheckpointError, match=r"float64"):
        load_checkpoint(start(mlp_case(torch.float64)), path)
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(manifest | {"format": 99}))
    with pytest.raises(CheckpointError, match="format 99"):
        load_checkpoint(start(mlp_case()), path)


def test_neither_checkpoint_nor_ledger_tells_a_seed(tmp_path: Path) -> None:
    """A hash of a small number is as good as the number, and the number gives the noise away."""
    plans = []
    for seed in (3, 4, None):
        folder = tmp_path / str(seed)
        folder.mkdir()
        path = save_checkpoint(start(mlp_case(), folder, seed=seed), folder)
        first, *_ = (folder / "ledger.jsonl").read_text().splitlines()
        run_file = json.loads((path / "run.json").read_text())
        plans.append((run_file["plan"], json.loads(first)["plan"]))
    assert plans[0] == plans[1]
    assert all(one != other for one, other in zip(plans[1], plans[2], strict=True))


def test_a_ledger_gone_on_with_under_another_seed_certifies_nothing(tmp_path: Path) -> None:
    first = start(mlp_case(), tmp_path, seed=3)
    run(first, mlp_case(), num_steps=2)
    again = start(mlp_case(), tmp_path, seed=4)
    run(again, mlp_case(), num_steps=2)
    assert again.ledger.spent == 4
    assert again.card().certified is None


def test_a_lost_ledger_is_noticed(tmp_path: Path) -> None:
    private = start(mlp_case(), tmp_path)
    run(private, mlp_case(), num_steps=2)
    path = save_checkpoint(private, tmp_path)
    (tmp_path / "ledger.jsonl").unlink()
    with pytest.raises(CheckpointError, match="put back the ledger"):
        load_checkpoint(start(mlp_case(), tmp_path), path)


def test_only_whole_checkpoints_are_found_and_old_ones_go(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path / "nowhere") is None
    private = start(mlp_case())
    for _ in range(3):
        run(private, mlp_case(), num_steps=1)
        save_checkpoint(private, tmp_path, keep=2)
    names = [path.name for path in find_checkpoints(tmp_path)]
    assert names == ["checkpoint-00000002", "checkpoint-00000003"]
    shutil.copytree(tmp_path / names[0], tmp_path / ".checkpoint-00000009.1.tmp")
    save_checkpoint(private, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    with pytest.raises(InvalidArgumentError, match="keep"):
        save_checkpoint(private, tmp_path, keep=0)


class Killed(BaseException):
    """Stands for the end of the process: nothing of ours may catch it."""


class DiesAt:
    """Lets so many changes of the file system through, then dies before the next one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, calls: int) -> None:
        self.left = calls
        monkeypatch.setattr(os, "rename", self._counted(os.rename))
        monkeypatch.setattr(os, "unlink", self._counted(os.unlink))
        monkeypatch.setattr(os, "rmdir", self._counted(os.rmdir))

    def _counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            if self.left == 0:
                raise Killed
            self.left -= 1
            return call(*args, **kwargs)

        return counted


def test_a_full_disk_is_called_full_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch says of it that a file ends too soon."""

    def fail(*args: Any) -> None:
        raise RuntimeError("unexpected pos 64 vs 0")

    monkeypatch.setattr("torch.save", fail)
    private = start(mlp_case())
    with pytest.raises(CheckpointError, match="unexpected pos"):
        save_checkpoint(private, tmp_path)
    full = SimpleNamespace(free=4096)
    monkeypatch.setattr("shutil.disk_usage", lambda path: full)
    with pytest.raises(CheckpointError, match="the disk is full: 4,096 bytes are free"):
        save_checkpoint(private, tmp_path)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("again", [True, False], ids=["same step", "next step"])
def test_at_every_instant_one_complete_checkpoint_exists(tmp_path: Path, again: bool) -> None:
    """With `keep=1`, killed before any change a second checkpoint makes to the file system."""
    for calls in range(100):
        root = tmp_path / str(calls)
        private = start(mlp_case())
        run(private, mlp_case(), num_steps=1)
        save_checkpoint(private, root, keep=1)
        if not again:
            run(private, mlp_case(), num_steps=1)
        with pytest.MonkeyPatch.context() as patch:
            moments = DiesAt(patch, calls)
            with contextlib.suppress(Killed):
                save_checkpoint(private, root, keep=1)
        newest = latest_checkpoint(root)
        assert newest is not None, f"killed before change {calls}, and no checkpoint is left"
        resumed = start(mlp_case())
        load_checkpoint(resumed, newest)
        save_checkpoint(resumed, root, keep=1)
        assert sorted(path.name for path in root.iterdir()) == [
            f"checkpoint-{resumed.steps_taken:08d}"
        ]
        if moments.left > 0:
            return
    raise AssertionError("saving never came to its end")


def test_a_checkpoint_just_written_is_not_an_old_one(tmp_path: Path) -> None:
    """One left by an earlier run in the folder has taken more steps, and is older all the same."""
    earlier = start(mlp_case())
    run(earlier, mlp_case(), num_steps=3)
    save_checkpoint(earlier, tmp_path, keep=1)
    private = start(mlp_case())
    run(private, mlp_case(), num_steps=1)
    assert save_checkpoint(private, tmp_path, keep=1).is_dir()


def test_released_weights_that_were_changed_are_not_saved(tmp_path: Path) -> None:
    """Neither by the run that released them nor by one that goes on from its checkpoint."""
    private = start(mlp_case())
    run(private, mlp_case())
    private.release()
    checkpoint = save_checkpoint(private, tmp_path)
    private.close()
    again = start(mlp_case())
    load_checkpoint(again, checkpoint)
    save_checkpoint(again, tmp_path / "same")
    for each in (private, again):
        with torch.no_grad():
            next(each.model.parameters()).mul_(1.01)
        with pytest.raises(InvalidArgumentError, match="left them"):
            save_checkpoint(each, tmp_path / "other")
