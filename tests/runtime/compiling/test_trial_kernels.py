"""What is compiled ahead of any run is what trials launch, where there is a chip for it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from shuffled_dpsgd.runtime.compiling import trial_kernels, worker

SCRIPT = Path(__file__).with_name("trial_variants.py")


def test_a_process_without_torch_compiles_what_a_trial_launches() -> None:
    pytest.importorskip("triton.experimental.gluon")
    processes = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), *options],
            env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for options in ([], ["--ahead"])
    ]
    with_torch, ahead = (json.loads(process.communicate(timeout=100)[0]) for process in processes)
    assert [name for name, _ in ahead] == ["parted_outer_kernel", "square_kernel"]
    assert ahead == with_torch


class Nvml:
    """The library, for GPUs of these chips; one that is not well has none."""

    def __init__(self, chips: list[int | None], status: int = 0) -> None:
        self._chips, self._status = chips, status
        self.open = 0

    def nvmlInit_v2(self) -> int:  # noqa: N802
        self.open += 1
        return self._status

    def nvmlShutdown(self) -> int:  # noqa: N802
        self.open -= 1
        return 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:  # noqa: N802
        count._obj.value = len(self._chips)
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, place: int, gpu: Any) -> int:  # noqa: N802
        gpu._obj.value = place + 1
        return int(self._chips[place] is None)

    def nvmlDeviceGetCudaComputeCapability(self, gpu: Any, *numbers: Any) -> int:  # noqa: N802
        chip = self._chips[gpu.value - 1]
        assert chip is not None
        for number, value in zip(numbers, divmod(chip, 10), strict=True):
            number._obj.value = value
        return 0


def test_chips_are_found_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = Nvml([80, None, 90, 120])
    monkeypatch.setattr(trial_kernels.ctypes, "CDLL", lambda name: nvml)
    assert trial_kernels.chips() == [80, 90, 120]
    assert nvml.open == 0
    monkeypatch.setattr(trial_kernels.ctypes, "CDLL", lambda name: Nvml([90], status=9))
    assert trial_kernels.chips() == []


def test_without_the_library_there_is_no_chip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial_kernels, "_NVML", "libno-such-thing.so.1")
    assert trial_kernels.chips() == []


@pytest.mark.parametrize(("chips", "found"), [([], False), ([80], False), ([89, 90], True)])
def test_only_a_chip_that_is_served_is_compiled_for(
    chips: list[int], found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[Any] = []
    monkeypatch.setattr(trial_kernels, "chips", lambda: chips)
    monkeypatch.setattr(trial_kernels, "compile_trial", lambda *given: compiled.append(given))
    plain, trial = ModuleType("plain"), ModuleType("trial")
    trial.compile_trial = print  # type: ignore[attr-defined]
    for work in trial_kernels.trials_here([plain, trial]):
        work()
    assert compiled == ([(trial, 90)] if found else [])


@pytest.mark.parametrize(("is_early", "asked"), [(True, False), (False, False), (True, True)])
def test_processes_compile_ahead_if_they_are_early_and_nobody_asks(
    is_early: bool, asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[str] = []

    def run(work: Any) -> int:
        work()
        return 0

    monkeypatch.setattr(worker, "IDLE_SECONDS", 0.01)
    monkeypatch.setattr(worker, "leave_torch_out", lambda: None)
    monkeypatch.setattr(worker, "_get_ready", lambda: None)
    monkeypatch.setattr(worker, "_build_driver", lambda: None)
    monkeypatch.setattr(worker, "_fork", run)
    monkeypatch.setattr(worker, "_turns", None)
    monkeypatch.setattr(worker, "kernel_modules", list)
    monkeypatch.setattr(worker, "serve", lambda lanes, reason: None)
    monkeypatch.setattr(worker.os, "waitpid", lambda fork, options: None)
    monkeypatch.setattr(worker, "trials_here", lambda modules: [lambda: compiled.append("trial")])
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2)]
    if asked:
        pairs[0][0].send(b"compile")
    worker.main([theirs.detach() for _, theirs in pairs], 1, is_early=is_early)
    for ours, _ in pairs:
        ours.close()
    assert compiled == (["trial"] if is_early and not asked else [])


# One process holds the turn of a variant, named by its key, until the other has had another turn.
TURNS = """import os, time
from shuffled_dpsgd.runtime.compiling import requests, worker
requests.key_on_disk = lambda key: key
worker._turns = os.memfd_create("variants")
(begun, begin), (ended, end) = os.pipe(), os.pipe()
if os.fork() == 0:
    with worker._alone("aa" * 32):
        os.write(begin, b"!")
        os.read(ended, 1)
        time.sleep(0.2)
        print("first", flush=True)
    os._exit(0)
os.read(begun, 1)
with worker._alone("bb" * 32):
    print("another", flush=True)
os.write(end, b"!")
with worker._alone("aa" * 32):
    print("second", flush=True)
"""


def test_a_variant_that_is_being_compiled_is_waited_for_and_others_are_not() -> None:
    done = subprocess.run(
        [sys.executable, "-c", TURNS], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == ["another", "first", "second"]
