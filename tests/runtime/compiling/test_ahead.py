"""What is compiled ahead of any run is what runs need, where there is a chip for it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from shuffled_dpsgd.runtime.compiling import ahead, worker

SCRIPT = Path(__file__).with_name("ahead_variants.py")


def test_what_is_compiled_ahead_is_what_trials_and_popular_layers_launch() -> None:
    """Neither a variant too few nor one too many, by the code that settles such layers."""
    pytest.importorskip("triton.experimental.gluon")
    pytest.importorskip("transformers")
    processes = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), side],
            env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for side in ("needed", "ahead")
    ]
    needed, found = (json.loads(process.communicate(timeout=100)[0]) for process in processes)
    compiled = {tuple(variant) for variant in found["ahead"]}
    for kind, variants in needed.items():
        missing = {tuple(variant) for variant in variants} - compiled
        assert not missing, f"{kind} would wait for {sorted(missing)}"
    wanted = {tuple(variant) for variants in needed.values() for variant in variants}
    assert compiled == wanted
    counts = Counter(name for name, _ in compiled)
    assert counts == {
        "parted_outer_kernel": 25,
        "gram_kernel": 8,
        "pair_kernel": 19,
        "share_kernel": 9,
        "norm_kernel": 4,
        "strip_gram_kernel": 2,
        "square_kernel": 1,
    }


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
    monkeypatch.setattr(ahead.ctypes, "CDLL", lambda name: nvml)
    assert ahead.chips() == [80, 90, 120]
    assert nvml.open == 0
    monkeypatch.setattr(ahead.ctypes, "CDLL", lambda name: Nvml([90], status=9))
    assert ahead.chips() == []


def test_without_the_library_there_is_no_chip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "_NVML", "libno-such-thing.so.1")
    assert ahead.chips() == []


@pytest.mark.parametrize(("chips", "chip"), [([], None), ([80], None), ([89, 90], 90)])
def test_only_a_chip_that_is_served_is_compiled_for(
    chips: list[int], chip: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead, "chips", lambda: chips)
    assert ahead.chip_here() == chip


def module_with(*launches: str) -> Any:
    module: Any = ModuleType("kernels")
    module.launches_ahead = lambda pointer: launches
    return module


def test_trials_come_before_popular_layers() -> None:
    modules = [module_with("trial"), ModuleType("plain"), module_with("its trial", "first", "last")]
    found: list[Any] = ahead.launches_of(modules)
    assert found == ["trial", "its trial", "first", "last"]


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
    monkeypatch.setattr(worker, "_compile_ahead", lambda *_: compiled.append("ahead"))
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2)]
    if asked:
        pairs[0][0].send(b"compile")
    worker.main([theirs.detach() for _, theirs in pairs], 1, is_early=is_early)
    for ours, _ in pairs:
        ours.close()
    assert compiled == (["ahead"] if is_early and not asked else [])


# A process that compiles ahead, whose asker is the process named first. A launch writes its number
# and how nice it is; the second one fails; each takes as many seconds as are named second.
AHEAD = """import os, sys, time
from functools import partial
from shuffled_dpsgd.runtime.compiling import worker
asker, seconds = int(sys.argv[1]), float(sys.argv[2])

def launch(number):
    os.write(1, f"{number}:{os.nice(0)} ".encode())
    time.sleep(seconds)
    if number == 1:
        raise ValueError

worker.chip_here = lambda: 90
worker.only_compile = lambda chip: None
worker.launches_of = lambda modules: [partial(launch, number) for number in range(20)]
worker._compile_ahead([], [], 3, asker)
os.write(1, b"end")
"""


def compile_ahead(asker: int, seconds: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", AHEAD, str(asker), str(seconds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_every_launch_is_compiled_once_whatever_happens_to_another() -> None:
    *launches, end = compile_ahead(os.getpid(), 0.0).communicate(timeout=60)[0].split()
    numbers, niceness = zip(*(launch.split(":") for launch in launches), strict=True)
    assert sorted(map(int, numbers)) == list(range(20))
    assert set(niceness) == {str(min(19, os.nice(0) + 10))}
    assert end == "end"


def test_nothing_is_begun_once_the_asker_has_ended() -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as asker:
        process = compile_ahead(asker.pid, 0.3)
        assert process.stdout is not None
        process.stdout.read(1)
        asker.send_signal(signal.SIGKILL)
    began = time.monotonic()
    rest = process.communicate(timeout=60)[0]
    assert rest.endswith("end")
    assert rest.count(":") < 20
    assert time.monotonic() - began < 20 * 0.3 / 3


def test_nothing_is_begun_without_a_chip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "chip_here", lambda: None)
    monkeypatch.setattr(worker, "_fork", lambda work: pytest.fail("a process was begun"))
    ours, theirs = socket.socketpair()
    worker._compile_ahead([module_with("trial")], [theirs], 3, os.getpid())
    assert theirs.fileno() == -1, "whoever asks would wait for this process"
    ours.close()


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
