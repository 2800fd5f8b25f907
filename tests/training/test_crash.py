"""Kill the process at random moments, start it again: same bits, every release accounted for."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from shuffled_dpsgd.training import find_checkpoints

SCRIPT = Path(__file__).with_name("killable.py")
STEPS = 50
MANY_STEPS = 150


class Nursery:
    """Starts runs one at a time in processes that the test may kill."""

    def __init__(self) -> None:
        self._server = subprocess.Popen(
            [sys.executable, str(SCRIPT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )

    def start(self, directory: Path, seed: str, steps: int = STEPS) -> int:
        """Start or resume the run in `directory`; its process id."""
        directory.mkdir(exist_ok=True)
        self._tell(f"{directory} {steps} {seed}\n")
        return self._hear()

    def wait(self) -> int:
        """The exit code of the run started last, negative for a signal."""
        return self._hear()

    def finish(self, directory: Path, seed: str, steps: int = STEPS) -> list[str]:
        """Run to the end; steps taken, finished, interrupted by."""
        self.start(directory, seed, steps)
        assert self.wait() == 0
        return (directory / "outcome.txt").read_text().split()

    def close(self) -> None:
        self._server.communicate()

    def _tell(self, text: str) -> None:
        assert self._server.stdin is not None
        self._server.stdin.write(text)
        self._server.stdin.flush()

    def _hear(self) -> int:
        assert self._server.stdout is not None
        return int(self._server.stdout.readline())


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    nursery = Nursery()
    yield nursery
    nursery.close()


def ledger_entries(directory: Path) -> int:
    path = directory / "ledger.jsonl"
    return max(path.read_bytes().count(b"\n") - 1, 0) if path.exists() else 0


def updates(directory: Path) -> list[tuple[int, int]]:
    path = directory / "released.txt"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [(int(step), int(spent)) for step, spent in (line.split() for line in lines)]


def kill(
    nursery: Nursery, directory: Path, seed: str, rng: random.Random, steps: int = STEPS
) -> None:
    """Start or resume, and kill -9 at a random moment of one of the next few steps."""
    target = ledger_entries(directory) + rng.randint(0, 4)
    process = nursery.start(directory, seed, steps)
    deadline = time.monotonic() + 60
    while ledger_entries(directory) < target:
        assert time.monotonic() < deadline
        time.sleep(0.0002)
    time.sleep(rng.random() * 0.02)
    os.kill(process, signal.SIGKILL)
    assert nursery.wait() == -signal.SIGKILL


def kill_and_resume(nursery: Nursery, tmp_path: Path, kills: int, steps: int) -> None:
    assert nursery.finish(tmp_path / "whole", "5", steps) == [str(steps), "True", "None"]
    rng = random.Random(kills)
    crashed = tmp_path / "crashed"
    for _ in range(kills):
        kill(nursery, crashed, "5", rng, steps)
        seen = {step for step, _ in updates(crashed)}
        assert len(seen) <= ledger_entries(crashed), "an update happened that no entry announced"
    assert 0 < ledger_entries(crashed) < steps
    assert nursery.finish(crashed, "5", steps) == [str(steps), "True", "None"]
    expected = torch.load(tmp_path / "whole" / "final.pt", weights_only=True)
    found = torch.load(crashed / "final.pt", weights_only=True)
    assert torch.equal(expected, found)
    assert ledger_entries(crashed) == steps
    assert {step for step, _ in updates(crashed)} == set(range(steps))


@pytest.mark.slow
def test_killed_three_times_resumes_to_the_same_bits(nursery: Nursery, tmp_path: Path) -> None:
    kill_and_resume(nursery, tmp_path, kills=3, steps=STEPS)


@pytest.mark.slow
def test_killed_twenty_times_resumes_to_the_same_bits(nursery: Nursery, tmp_path: Path) -> None:
    kill_and_resume(nursery, tmp_path, kills=20, steps=MANY_STEPS)


@pytest.mark.slow
def test_a_killed_secure_run_pays_for_every_release(nursery: Nursery, tmp_path: Path) -> None:
    rng = random.Random(1)
    for _ in range(2):
        kill(nursery, tmp_path / "run", "none", rng)
    steps, finished, _ = nursery.finish(tmp_path / "run", "none")
    assert finished == "True"
    assert ledger_entries(tmp_path / "run") == STEPS
    happened = len(updates(tmp_path / "run"))
    assert int(steps) <= happened <= STEPS


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM]
)
def test_signals_finish_the_step_and_write_a_checkpoint(
    nursery: Nursery, tmp_path: Path, number: signal.Signals
) -> None:
    run = tmp_path / "run"
    process = nursery.start(run, "5")
    while ledger_entries(run) < 3:
        time.sleep(0.0005)
    os.kill(process, number)
    assert nursery.wait() == 0
    steps, finished, name = (run / "outcome.txt").read_text().split()
    assert (finished, name) == ("False", number.name)
    assert find_checkpoints(run / "checkpoints")[-1].name == f"checkpoint-{int(steps):08d}"
    assert ledger_entries(run) == len(updates(run)) == int(steps)
