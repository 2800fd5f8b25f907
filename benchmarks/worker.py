"""One side of a comparison: prepares its step, then times it whenever it is asked to.

`benchmarks.step` starts it as a process of its own, with the package and the benchmarks of one tree
on its path. That tree may be an earlier one, so this file uses only what both states have.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import pstats
import resource
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.adapters import Setting, build
from benchmarks.results import environment
from benchmarks.workloads import Batch, workload

# Steps before a block that are not timed: the side before left its traces in the caches.
LEAD_STEPS = 2
# Steps of which a trace is taken, and what counts as the device's work there.
BUSY_STEPS = 3
DEVICE_WORK = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
GIB = 2**30


class Side:
    """A model, its batch and one whole step of training, behind the questions of `benchmarks.step`.

    Every public method is a question; its answer is plain data.
    """

    def __init__(self, adapter: str, setting: Setting) -> None:
        self._adapter = adapter
        self._setting = setting
        self._step: Callable[[Batch], None] = lambda batch: None
        self._batch: Batch = {}

    def prepare(self, warmup: int) -> dict[str, Any]:
        """Build and warm up; the peak of memory until then, and that of one step afterwards.

        On a CPU it is what the process has grown by since before the model was built.
        """
        before = self._peak_bytes()
        torch.manual_seed(0)
        with self._setting.device:
            model = self._setting.workload.build()
        self._step = build(self._adapter, model.train(), self._setting)
        self._batch = self._setting.workload.batch(self._setting.device)
        self._run(warmup)
        peak = self._peak_bytes()
        if self._on_gpu:
            torch.cuda.reset_peak_memory_stats()
        self._run(1)
        step_peak = self._peak_bytes()
        before = 0 if self._on_gpu else before
        return {
            "peak_gib": (max(peak, step_peak) - before) / GIB,
            "step_peak_gib": step_peak / GIB if self._on_gpu else None,
            "environment": environment(self._setting.device, bfloat16=self._setting.bfloat16),
        }

    def block(self, steps: int) -> tuple[float, float]:
        """Seconds of `steps` steps between two synchronisations, and those of all cores."""
        self._run(LEAD_STEPS)
        start, on_cores = time.perf_counter(), time.process_time()
        self._run(steps)
        return time.perf_counter() - start, time.process_time() - on_cores

    def host(self) -> float:
        """Seconds until one step returns when nothing is queued before it."""
        self._synchronise()
        start = time.perf_counter()
        self._step(self._batch)
        return time.perf_counter() - start

    def busy(self) -> float | None:
        """Seconds that a GPU works on one step; None on a CPU."""
        if not self._on_gpu:
            return None
        self._run(LEAD_STEPS)
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            self._run(BUSY_STEPS)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(path))
            events = json.loads(path.read_text())["traceEvents"]
        return 1e-6 * busy_time(events) / BUSY_STEPS

    def calls(self) -> int:
        """Python calls of one step: what the host has to do, whatever its speed."""
        profiler = cProfile.Profile()
        profiler.runcall(self._step, self._batch)
        return pstats.Stats(profiler).total_calls  # type: ignore[attr-defined, no-any-return]

    @property
    def _on_gpu(self) -> bool:
        return self._setting.device.type == "cuda"

    def _run(self, steps: int) -> None:
        for _ in range(steps):
            self._step(self._batch)
        self._synchronise()

    def _synchronise(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize()

    def _peak_bytes(self) -> int:
        if self._on_gpu:
            return torch.cuda.max_memory_allocated()
        gc.collect()
        return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def busy_time(events: Sequence[dict[str, Any]]) -> float:
    """The time covered by work on a device, in a trace's units; what overlaps counts once."""
    spans = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") in DEVICE_WORK)
    total, end = 0.0, float("-inf")
    for begin, finish in spans:
        total += max(0.0, finish - max(begin, end))
        end = max(end, finish)
    return total


def serve(pipe: Connection, side: Side, *, is_competitor: bool) -> None:
    """Answer questions until nobody asks any more. An error is an answer too."""
    while True:
        try:
            question, numbers = pipe.recv()
        except EOFError:
            return
        try:
            answer = getattr(side, question)(*numbers)
        except Exception as error:
            if not is_competitor:
                traceback.print_exception(error)
            words = " ".join(str(error).split())[:300]
            pipe.send((True, f"{type(error).__name__}: {words}"))
        else:
            pipe.send((False, answer))


def main() -> None:
    parser = argparse.ArgumentParser(description="One side of `benchmarks.step`; not to be called.")
    parser.add_argument("--workload", required=True)
    parser.add_argument("--adapter", required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--bfloat16", action="store_true")
    parser.add_argument("--tf32", action="store_true")
    parser.add_argument("--pipe", type=int, required=True)
    options = parser.parse_args()
    torch.set_float32_matmul_precision("high" if options.tf32 else "highest")
    setting = Setting(
        workload=workload(options.workload),
        device=torch.device(options.device),
        bfloat16=options.bfloat16,
    )
    is_competitor = options.adapter.startswith("opacus")
    serve(Connection(options.pipe), Side(options.adapter, setting), is_competitor=is_competitor)


if __name__ == "__main__":
    main()
