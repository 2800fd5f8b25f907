"""Work done ahead, in threads, so that kernels are compiled by the time they are needed.

Compiling a kernel takes up to a few seconds. So a rehearsal runs a small problem by the very code
that the large one will take, and throws the result away. The compiler itself runs in processes of
its own (`compiling`), because the threads share one interpreter. A rehearsal trusts that every
route serves, and does not wait for its trial. A rehearsal that fails is not reported: the work it
stands for fails in the same way, where its error belongs.

`SHUFFLED_DPSGD_REHEARSALS=0` turns rehearsals off, and these processes; kernels are then compiled
one after the other.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from shuffled_dpsgd.runtime import launchers
from shuffled_dpsgd.runtime.compiling import service
from shuffled_dpsgd.runtime.compiling.announcements import announced_by
from shuffled_dpsgd.runtime.interpreter_share import SHARE

SWITCH = "SHUFFLED_DPSGD_REHEARSALS"
# Every operation of torch releases the interpreter. It gets it back once another thread has had it
# for this long. At Python's default of 5 ms, a forward of a few hundred operations would wait for
# seconds.
SWITCH_SECONDS = 1e-4
# Threads wait for processes that compile most of the time; so there may be more than cores. A start
# has about thirty pieces of work, and one that waits for a thread asks for its kernels late.
FEWEST_THREADS = 32
SECONDS_AT_EXIT = 3.0
# One of these is there where the driver for NVIDIA GPUs is loaded; the last one on Windows' Linux.
_DRIVERS = tuple(map(Path, ("/dev/nvidiactl", "/proc/driver/nvidia", "/dev/dxg")))
Work = Callable[[], object]
_here = threading.local()


def may_rehearse(device: torch.device) -> bool:
    """Whether kernels are compiled for this device, and threads may do it."""
    return _is_wanted(device) and launchers.make_safe_for_threads()


def _is_wanted(device: torch.device) -> bool:
    return device.type == "cuda" and os.environ.get(SWITCH, "1") != "0"


def get_ready(device: torch.device) -> None:
    """Start the processes that compile kernels for this device, if there are to be any.

    Called as soon as it is known that there will be a private run, it saves the time they take to
    start.
    """
    if _is_wanted(device):
        service.begin()


def get_ready_early() -> None:
    """The same before a device is chosen, on a machine with an NVIDIA GPU.

    Only in a process of the user's own, not in those that load data for it.
    """
    is_first = multiprocessing.parent_process() is None
    if is_first and has_nvidia_gpu() and os.environ.get(SWITCH, "1") != "0":
        service.begin_early()


def has_nvidia_gpu() -> bool:
    """Whether a GPU seems to be there that this process may see; CUDA is not asked.

    Once it is asked it no longer looks at `CUDA_VISIBLE_DEVICES`, which may still be set.
    """
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
    has_driver = any(path.exists() for path in _DRIVERS)
    return torch.version.cuda is not None and seen not in ("", "-1") and has_driver


def are_whole(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether no tensor is spread over several processes, which a thread must not wait for."""
    return all(type(tensor) in (torch.Tensor, torch.nn.Parameter) for tensor in tensors)


def is_rehearsing() -> bool:
    """Whether the work that is being done here is a rehearsal."""
    return getattr(_here, "rehearses", False)


@dataclass(eq=False, slots=True)
class _Rehearsal:
    work: Work
    device: torch.device
    is_trial: bool
    announcement: Work | None
    is_urgent: bool
    over: threading.Event = field(default_factory=threading.Event)


class Rehearsals:
    """Does work in threads, in the order in which it was given, and what is urgent first.

    Threads are started when there is work and end when there is none. They are daemons, so that no
    process waits for all of their work to end.
    """

    def __init__(self, threads: int | None = None) -> None:
        self._most = threads or max(FEWEST_THREADS, os.cpu_count() or 1)
        self._lock = threading.Lock()
        self._urgent: deque[_Rehearsal] = deque()
        self._patient: deque[_Rehearsal] = deque()
        self._pending: dict[Hashable, list[_Rehearsal]] = {}
        self._running: set[_Rehearsal] = set()
        self._threads = 0
        # Whether a thread has been started that has no work yet.
        self._is_starting = False
        self._interval = sys.getswitchinterval()

    def add(
        self,
        topic: Hashable | None,
        work: Work,
        device: torch.device,
        *,
        is_trial: bool = False,
        announcement: Work | None = None,
        is_urgent: bool = True,
    ) -> None:
        """Have `work` done soon; `wait_for(topic)` waits for it, unless that is None.

        A trial of a route runs in the same threads, but is no rehearsal. An `announcement` is run
        inside `work` when a kernel is missing, so that all that it launches is compiled at the same
        time (`compiling.announcements` says what may be run so). Work that is not urgent comes
        after other work, and so do its kernels.
        """
        rehearsal = _Rehearsal(work, device, is_trial, announcement, is_urgent)
        with self._lock:
            if topic is not None:
                self._pending.setdefault(topic, []).append(rehearsal)
            (self._urgent if is_urgent else self._patient).append(rehearsal)
            starts = self._may_start()
            if starts and self._threads == 1:
                self._interval = sys.getswitchinterval()
                sys.setswitchinterval(min(self._interval, SWITCH_SECONDS))
        if starts:
            self._start()

    def wait_for(self, topic: Hashable) -> None:
        """Return once all work given under `topic` so far has been done."""
        if topic in self._pending:
            with self._lock:
                pending = self._pending.pop(topic, [])
            for rehearsal in pending:
                rehearsal.over.wait()

    def end(self, seconds: float) -> None:
        """Begin nothing more, and give what has begun some time to end.

        A process that ends while a thread is using its GPU may crash.
        """
        with self._lock:
            self._urgent.clear()
            self._patient.clear()
            running = list(self._running)
        deadline = time.monotonic() + seconds
        for rehearsal in running:
            rehearsal.over.wait(max(0.0, deadline - time.monotonic()))

    def _may_start(self) -> bool:
        """Whether the caller, who holds the lock, is to start a thread; it counts as started.

        One at a time: whoever starts a thread waits until it runs, and the thread that runs can do
        so for the next. So it is not always the main thread that waits.
        """
        starts = not self._is_starting and self._threads < self._most
        if starts:
            self._is_starting = True
            self._threads += 1
        return starts

    def _start(self) -> None:
        try:
            threading.Thread(target=self._run, name="rehearsal", daemon=True).start()
        except RuntimeError:
            with self._lock:
                self._is_starting = False
                self._threads -= 1
                is_alone = self._threads == 0
            if is_alone:
                raise  # Otherwise the threads there are do the work.

    def _run(self) -> None:
        is_new = True
        while True:
            with self._lock:
                waiting = self._urgent or self._patient
                if is_new:
                    self._is_starting = is_new = False
                if not waiting:
                    self._threads -= 1
                    if self._threads == 0:
                        sys.setswitchinterval(self._interval)
                    return
                rehearsal = waiting.popleft()
                self._running.add(rehearsal)
                starts = bool(self._urgent or self._patient) and self._may_start()
            try:
                if starts:
                    self._start()
                _do(rehearsal)
            finally:
                self._running.discard(rehearsal)
                rehearsal.over.set()


def _do(rehearsal: _Rehearsal) -> None:
    try:
        _here.rehearses = not rehearsal.is_trial
        if rehearsal.device.type == "cuda":
            service.wait_for_driver()
            torch.cuda.set_device(rehearsal.device)
        announced = announced_by(rehearsal.announcement, is_urgent=rehearsal.is_urgent)
        with torch.no_grad(), announced, SHARE.taken():
            rehearsal.work()
    except Exception:  # The work itself is still to come, and will say what is wrong.
        return


# All rehearsals of this process: they share its cores.
REHEARSALS = Rehearsals()
atexit.register(REHEARSALS.end, SECONDS_AT_EXIT)
