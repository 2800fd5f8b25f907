"""Kill the process at random moments, start it again: same bits, every release accounted for."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from shuffled_dpsgd.training import find_checkpoints

SCRIPT = Path(__file__).with_name("killable.py")
STEPS = 120


def launch(directory: Path, seed: str) -> subprocess.Popen[bytes]:
    directory.mkdir(exist_ok=True)
    arguments = [sys.executable, str(SCRIPT), str(directory), str(STEPS), seed]
    return subprocess.Popen(arguments, stderr=subprocess.PIPE)


def finish(directory: Path, seed: str) -> list[str]:
    process = launch(directory, seed)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors.decode()
    return (directory / "outcome.txt").read_text().split()


def ledger_entries(directory: Path) -> int:
    path = directory / "ledger.jsonl"
    return max(path.read_bytes().count(b"\n") - 1, 0) if path.exists() else 0


def updates(directory: Path) -> list[tuple[int, int]]:
    path = directory / "released.txt"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [(int(step), int(spent)) for step, spent in (line.split() for line in lines)]


def interrupt(directory: Path, seed: str, rng: random.Random, number: signal.Signals) -> bytes:
    """Send a signal some time after the process has got a few entries further; its stderr."""
    process = launch(directory, seed)
    target = ledger_entries(directory) + rng.randint(0, 4)
    deadline = time.monotonic() + 60
    while ledger_entries(directory) < target and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.0005)
    time.sleep(rng.random() * 0.02)
    process.send_signal(number)
    return process.communicate(timeout=60)[1]


def kill_and_resume(tmp_path: Path, kills: int) -> None:
    assert finish(tmp_path / "whole", "5") == [str(STEPS), "True", "None"]
    rng = random.Random(kills)
    crashed = tmp_path / "crashed"
    for _ in range(kills):
        interrupt(crashed, "5", rng, signal.SIGKILL)
        seen = {step for step, _ in updates(crashed)}
        assert len(seen) <= ledger_entries(crashed), "an update happened that no entry announced"
    assert 0 < ledger_entries(crashed) < STEPS
    assert finish(crashed, "5") == [str(STEPS), "True", "None"]
    expected = torch.load(tmp_path / "whole" / "final.pt", weights_only=True)
    found = torch.load(crashed / "final.pt", weights_only=True)
    assert torch.equal(expected, found)
    assert ledger_entries(crashed) == STEPS
    assert {step for step, _ in updates(crashed)} == set(range(STEPS))


def test_killed_three_times_resumes_to_the_same_bits(tmp_path: Path) -> None:
    kill_and_resume(tmp_path, kills=3)


@pytest.mark.slow
def test_killed_twenty_times_resumes_to_the_same_bits(tmp_path: Path) -> None:
    kill_and_resume(tmp_path, kills=20)


def test_a_killed_secure_run_pays_for_every_release(tmp_path: Path) -> None:
    rng = random.Random(1)
    for _ in range(2):
        interrupt(tmp_path / "run", "none", rng, signal.SIGKILL)
    steps, finished, _ = finish(tmp_path / "run", "none")
    assert finished == "True"
    assert ledger_entries(tmp_path / "run") == STEPS
    happened = len(updates(tmp_path / "run"))
    assert int(steps) <= happened <= STEPS


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_finish_the_step_and_write_a_checkpoint(
    tmp_path: Path, number: signal.Signals
) -> None:
    run = tmp_path / "run"
    process = launch(run, "5")
    while ledger_entries(run) < 3:
        time.sleep(0.0005)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors.decode()
    steps, finished, name = (run / "outcome.txt").read_text().split()
    assert (finished, name) == ("False", number.name)
    assert find_checkpoints(run / "checkpoints")[-1].name == f"checkpoint-{int(steps):08d}"
    assert ledger_entries(run) == len(updates(run)) == int(steps)
    assert os.listdir(run / "checkpoints")
