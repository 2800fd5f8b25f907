"""Checkpoints by several ranks: resumed by another number of them, every release counted once."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch

from distributed.launching import Launcher
from shuffled_dpsgd.training import find_checkpoints

HERE = "distributed.resumable"
STEPS = 9


def entries(folder: Path) -> int:
    """Releases in the ledger's file; its first line is the plan."""
    path = folder / "ledger.jsonl"
    return max(path.read_bytes().count(b"\n") - 1, 0) if path.exists() else 0


def updates(folder: Path) -> list[int]:
    path = folder / "released.txt"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [int(line.split()[0]) for line in lines]


@pytest.mark.parametrize(
    "sharded", ["split", *(pytest.param(x, marks=pytest.mark.slow) for x in (False, True, "2x2"))]
)
def test_another_number_of_ranks_goes_on_where_the_first_stopped(
    launcher: Launcher, tmp_path: Path, sharded: bool | str
) -> None:
    """On two copies of two shards it begins and ends, with one rank between."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir()
    parts.mkdir()
    steps = {"num_steps": STEPS, "shuffle": "off" if sharded == "split" else "auto"}
    (expected,) = launcher.run(HERE, "run", ranks=1, directory=str(whole), **steps)
    ranks = 4 if sharded == "2x2" else 2
    begun = {"directory": str(parts), "sharded": sharded, **steps}
    first = launcher.run(HERE, "run", ranks=ranks, stop_after=3, **begun)
    assert [one["steps"] for one in first] == [3] * ranks
    assert [c.name for c in find_checkpoints(parts / "checkpoints")][-1] == "checkpoint-00000003"
    of_one = sharded if sharded == "split" else bool(sharded)
    (second,) = launcher.run(HERE, "run", ranks=1, stop_after=3, **begun | {"sharded": of_one})
    assert (second["first"], second["steps"], second["spent"]) == (3, 6, 6)
    last = launcher.run(HERE, "run", ranks=4 if sharded in ("2x2", "split") else 3, **begun)
    for one in last:
        assert (one["first"], one["steps"], one["finished"]) == (6, STEPS, True)
        assert one["spent"] == entries(parts) == STEPS
        assert torch.allclose(one["weights"], expected["weights"], rtol=1e-9, atol=1e-12)
        assert torch.allclose(one["average"], expected["average"], rtol=1e-9, atol=1e-12)
        assert not torch.allclose(one["average"], one["weights"], rtol=1e-3)


@pytest.mark.parametrize("first", ["split", True])
def test_split_layers_and_rows_are_not_resumed_as_each_other(
    launcher: Launcher, tmp_path: Path, first: bool | str
) -> None:
    begun = {"directory": str(tmp_path), "num_steps": STEPS, "shuffle": "off"}
    launcher.run(HERE, "run", stop_after=3, sharded=first, **begun)
    launcher.start(HERE, "run", sharded=True if first == "split" else "split", **begun)
    assert launcher.wait() == [1, 1]
    assert "resume it as it was begun" in launcher.error(0)
    assert entries(tmp_path) == 3


def test_a_signal_to_one_rank_stops_all_after_the_same_step(
    launcher: Launcher, tmp_path: Path
) -> None:
    """Many steps, because nobody knows when the signal comes."""
    pids = launcher.start(HERE, "run", directory=str(tmp_path), num_steps=400)
    wait_for(tmp_path, 3)
    os.kill(pids[1], signal.SIGTERM)
    assert launcher.wait() == [0, 0]
    one, two = launcher.results(2)
    assert one["interrupted"] == two["interrupted"] == "SIGTERM"
    assert one["steps"] == two["steps"] == entries(tmp_path) == len(updates(tmp_path)) < 400
    newest = find_checkpoints(tmp_path / "checkpoints")[-1]
    assert newest.name == f"checkpoint-{one['steps']:08d}"


def kill_one_and_resume(
    launcher: Launcher, folder: Path, *, kills: int, secure: bool, sharded: bool | str = False
) -> None:
    """kill -9 a random rank at random moments; the others end by themselves."""
    folder.mkdir()
    rng = random.Random(kills)
    steps = 12 * kills
    ranks = 4 if sharded == "2x2" else 2
    options = {"num_steps": steps, "secure": secure, "sharded": sharded, "ranks": ranks}
    for _ in range(kills):
        target = entries(folder) + rng.randint(1, 4)
        pids = launcher.start(HERE, "run", directory=str(folder), **options)
        wait_for(folder, target)
        time.sleep(rng.random() * 0.02)
        victim = rng.randrange(ranks)
        os.kill(pids[victim], signal.SIGKILL)
        codes = launcher.wait()
        assert codes[victim] == -signal.SIGKILL
        for other in {*range(ranks)} - {victim}:
            assert codes[other] == 1
            assert "RankError" in launcher.error(other)
        assert len(set(updates(folder))) <= entries(folder), "an update that no entry announced"
    found = launcher.run(HERE, "run", directory=str(folder), **options)
    assert all(one["finished"] and one["spent"] == steps for one in found)
    assert torch.equal(found[0]["weights"], found[1]["weights"])
    assert entries(folder) == steps
    if secure:
        assert len(updates(folder)) <= steps, "a release that was not counted"
    else:
        assert set(updates(folder)) == set(range(steps))


@pytest.mark.parametrize(
    ("secure", "sharded"),
    [
        (False, False),
        pytest.param(False, True, marks=pytest.mark.slow),
        pytest.param(True, "split", marks=pytest.mark.slow),
        pytest.param(True, False, marks=pytest.mark.slow),
        pytest.param(True, "2x2", marks=pytest.mark.slow),
    ],
)
def test_a_killed_rank_costs_nothing_but_lost_steps(
    launcher: Launcher, tmp_path: Path, secure: bool, sharded: bool | str
) -> None:
    kill_one_and_resume(launcher, tmp_path / "run", kills=1, secure=secure, sharded=sharded)


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("secure", [False, True])
def test_twenty_killed_ranks_cost_nothing_but_lost_steps(
    launcher: Launcher, tmp_path: Path, secure: bool, sharded: bool
) -> None:
    kill_one_and_resume(launcher, tmp_path / "run", kills=20, secure=secure, sharded=sharded)


def wait_for(folder: Path, target: int) -> None:
    deadline = time.monotonic() + 60
    while entries(folder) < target:
        assert time.monotonic() < deadline
        time.sleep(0.001)
