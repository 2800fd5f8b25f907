"""How steps are timed: all adapters of a workload are prepared, then run in interleaved rounds.

A host's speed changes from minute to minute by more than the differences of interest. So every
adapter runs one block of steps in every round, and adapters are compared within rounds only.
"""

from __future__ import annotations

import gc
import json
import signal
import statistics
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.adapters import Setting, Step, build
from benchmarks.workloads import Batch
from shuffled_dpsgd.errors import ShuffledDPError
from shuffled_dpsgd.runtime import backends

# Whom the others are compared with, in every round in which both ran.
BASELINES = ("plain", "plain:compiled", "opacus:ghost")
HOST_STEPS = 5
# Steps at the start of a block that are not timed: the adapter before left its traces in the
# caches of memory and of the allocator, as would happen to nobody in training.
LEAD_STEPS = 2
# Steps of which a trace is taken, and what counts as the device's work there.
BUSY_STEPS = 3
DEVICE_WORK = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
GIB = 2**30


def failures() -> tuple[type[Exception], ...]:
    """What may stop one adapter without stopping the benchmark."""
    usual: tuple[type[Exception], ...] = (
        ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, RuntimeError,
        ShuffledDPError, TimeoutError, TypeError, ValueError,
    )  # fmt: skip
    try:
        from triton.errors import TritonError
    except ImportError:
        return usual
    return (*usual, TritonError)


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One adapter on one workload in one run.

    `block_seconds` has the seconds of a whole block of `steps` steps for every round;
    `round_ratios` the throughput over that of each baseline of the same run, for every round.
    `peak_gib` covers preparation and steps, `step_peak_gib` one step after the warm-up.
    `busy_seconds` is how long a GPU works on one step: its idle time is not in it.
    `core_seconds` is what the process used of its cores for a block, which others on the host
    hardly change.
    """

    run: str
    workload: str
    adapter: str
    batch_size: int
    steps: int
    preparation_seconds: float
    peak_gib: float | None
    step_peak_gib: float | None
    host_seconds: tuple[float, ...]
    block_seconds: tuple[float, ...]
    core_seconds: tuple[float, ...]
    busy_seconds: float | None
    round_ratios: dict[str, tuple[float, ...]]
    error: str | None

    @property
    def step_seconds(self) -> float:
        return statistics.median(self.block_seconds) / self.steps

    def to_json(self) -> dict[str, object]:
        return asdict(self)


@dataclass(kw_only=True)
class Contestant:
    """One adapter while it is measured; its step is dropped once it fails or is done."""

    adapter: str
    step: Step | None = None
    batch: Batch = field(default_factory=dict)
    preparation_seconds: float = 0.0
    peak_gib: float | None = None
    step_peak_gib: float | None = None
    host_seconds: list[float] = field(default_factory=list)
    block_seconds: list[float] = field(default_factory=list)
    core_seconds: list[float] = field(default_factory=list)
    busy_seconds: float | None = None
    error: str | None = None

    @property
    def is_competitor(self) -> bool:
        return not self.adapter.startswith(("ours", "plain"))

    def fail(self, error: Exception) -> None:
        """Record the error and let go of the memory. Only a competitor's is no news."""
        if not self.is_competitor:
            traceback.print_exception(error)
        self.error = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        self.drop()

    def drop(self) -> None:
        self.step, self.batch = None, {}


class Contest:
    """All adapters on one workload."""

    def __init__(self, setting: Setting, adapters: Sequence[str]) -> None:
        self.setting = setting
        self.contestants = [Contestant(adapter=name) for name in dict.fromkeys(adapters)]

    def prepare(self, *, warmup: int, limit_seconds: float) -> None:
        """Build and warm up every adapter, so that nothing is compiled later.

        An adapter that is not ready within `limit_seconds` of the first one's start has failed.
        """
        end = time.monotonic() + limit_seconds
        for contestant in self.contestants:
            start = time.monotonic()
            try:
                with interrupted_at(end, f"not prepared within {limit_seconds:.0f} s"):
                    self._prepare(contestant, warmup)
            except failures() as error:
                contestant.fail(error)
            contestant.preparation_seconds = time.monotonic() - start
            release(self.setting.device)

    def time(self, *, rounds: int, steps: int) -> None:
        """Run every adapter once per round, each round beginning with another one."""
        device = self.setting.device
        for contestant in self.running():
            with recorded(contestant):
                # The first step after a pause is slower than the others.
                self._block(contestant, 1)
                contestant.host_seconds = [self._host(contestant) for _ in range(HOST_STEPS)]
        for number in range(rounds):
            order = self.running()
            first = number % max(1, len(order))
            for contestant in order[first:] + order[:first]:
                with recorded(contestant):
                    seconds, core_seconds = self._block(contestant, steps)
                    contestant.block_seconds.append(seconds)
                    contestant.core_seconds.append(core_seconds)
        for contestant in self.running() if device.type == "cuda" else ():
            with recorded(contestant):
                contestant.busy_seconds = self._busy(contestant)
        for contestant in self.contestants:
            contestant.drop()
        release(device)

    def routes(self) -> dict[str, object]:
        """The faster routes that the adapters have taken."""
        return backends.report()

    def close(self) -> None:
        """End whatever the contest has started."""

    def _prepare(self, contestant: Contestant, warmup: int) -> None:
        prepare(contestant, self.setting, warmup)

    def _block(self, contestant: Contestant, steps: int) -> tuple[float, float]:
        return time_block(contestant, self.setting.device, steps)

    def _host(self, contestant: Contestant) -> float:
        return time_host(contestant, self.setting.device)

    def _busy(self, contestant: Contestant) -> float:
        return time_busy(contestant, self.setting.device)

    def running(self) -> list[Contestant]:
        return [contestant for contestant in self.contestants if contestant.error is None]

    def measurements(self, *, run: str, steps: int) -> list[Measurement]:
        blocks = {c.adapter: c.block_seconds for c in self.contestants}
        return [
            Measurement(
                run=run,
                workload=self.setting.workload.name,
                adapter=c.adapter,
                batch_size=self.setting.workload.batch_size,
                steps=steps,
                preparation_seconds=c.preparation_seconds,
                peak_gib=c.peak_gib,
                step_peak_gib=c.step_peak_gib,
                host_seconds=tuple(c.host_seconds),
                block_seconds=tuple(c.block_seconds),
                core_seconds=tuple(c.core_seconds),
                busy_seconds=c.busy_seconds,
                round_ratios=round_ratios(c.adapter, blocks),
                error=c.error,
            )
            for c in self.contestants
        ]


def round_ratios(adapter: str, blocks: dict[str, list[float]]) -> dict[str, tuple[float, ...]]:
    """Throughput of `adapter` over each baseline's, round by round, while both ran."""
    found = {
        baseline: tuple(
            theirs / mine for mine, theirs in zip(blocks[adapter], blocks[baseline], strict=False)
        )
        for baseline in BASELINES
        if baseline in blocks
    }
    return {baseline: ratios for baseline, ratios in found.items() if ratios}


def prepare(contestant: Contestant, setting: Setting, warmup: int) -> None:
    """Build the adapter, warm it up, and find its peak memory.

    What other adapters hold is subtracted, so the peak is that of the adapter alone.
    """
    device, on_gpu = setting.device, setting.device.type == "cuda"
    release(device)
    held = 0
    if on_gpu:
        # Their workspaces would else count for whichever adapter comes first.
        torch._C._cuda_clearCublasWorkspaces()
        held = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
    torch.manual_seed(0)
    with device:
        model = setting.workload.build()
    model.train()
    step = build(contestant.adapter, model, setting)
    batch = setting.workload.batch(device)
    for _ in range(warmup):
        step(batch)
    warmup_peak = torch.cuda.max_memory_allocated(device) if on_gpu else 0
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    step(batch)
    synchronise(device)
    if on_gpu:
        step_peak = torch.cuda.max_memory_allocated(device)
        contestant.step_peak_gib = (step_peak - held) / GIB
        contestant.peak_gib = (max(step_peak, warmup_peak) - held) / GIB
    contestant.step, contestant.batch = step, batch


@contextmanager
def recorded(contestant: Contestant) -> Iterator[None]:
    """A failure inside becomes the contestant's result."""
    try:
        yield
    except failures() as error:
        contestant.fail(error)


@contextmanager
def interrupted_at(end: float, message: str) -> Iterator[None]:
    """Raise a TimeoutError inside, in the main thread, when the monotonic clock shows `end`."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(message)

    if end <= time.monotonic():
        raise TimeoutError(message)
    if end == float("inf"):
        yield
        return
    before = signal.signal(signal.SIGALRM, stop)
    # Again and again, for an exception that meets a finalizer is lost.
    signal.setitimer(signal.ITIMER_REAL, end - time.monotonic(), 5.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def release(device: torch.device) -> None:
    """Give back memory that nobody refers to any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_block(contestant: Contestant, device: torch.device, steps: int) -> tuple[float, float]:
    """Seconds of `steps` steps between two synchronisations, after a few that do not count.

    Beside them the seconds that all cores together spent on it.
    """
    step, batch = contestant.step, contestant.batch
    assert step is not None
    for _ in range(LEAD_STEPS):
        step(batch)
    synchronise(device)
    start, on_cores = time.perf_counter(), time.process_time()
    for _ in range(steps):
        step(batch)
    synchronise(device)
    return time.perf_counter() - start, time.process_time() - on_cores


def time_busy(contestant: Contestant, device: torch.device) -> float:
    """Seconds that the device works on one step, after a few that do not count."""
    step = contestant.step
    assert step is not None
    for _ in range(LEAD_STEPS):
        step(contestant.batch)
    synchronise(device)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(BUSY_STEPS):
            step(contestant.batch)
        synchronise(device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return 1e-6 * busy_time(events) / BUSY_STEPS


def busy_time(events: Sequence[dict[str, Any]]) -> float:
    """The time covered by work on a device, in a trace's units; what overlaps counts once."""
    spans = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") in DEVICE_WORK)
    total, end = 0.0, float("-inf")
    for begin, finish in spans:
        total += max(0.0, finish - max(begin, end))
        end = max(end, finish)
    return total


def time_host(contestant: Contestant, device: torch.device) -> float:
    """Seconds until one step returns when nothing is queued before it."""
    assert contestant.step is not None
    synchronise(device)
    start = time.perf_counter()
    contestant.step(contestant.batch)
    return time.perf_counter() - start
