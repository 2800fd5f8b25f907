"""One of the processes of `benchmarks.versions`: prepares a step, and times a block when asked.

It runs with the package and the benchmarks of whichever tree is on its path, so it uses only what
both states of the code have.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.adapters import Setting
from benchmarks.measure import Contestant, prepare, time_block
from benchmarks.workloads import workload

# What a trace calls the functions of CUDA that a host calls.
CUDA_CALLS = frozenset({"cuda_runtime", "cuda_driver"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", required=True)
    parser.add_argument("--adapter", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--warmup", type=int, required=True)
    parser.add_argument("--device", required=True)
    options = parser.parse_args()
    device = torch.device(options.device)
    setting = Setting(
        workload=workload(options.workload), device=device, bfloat16=device.type == "cuda"
    )
    contestant = Contestant(adapter=options.adapter)
    prepare(contestant, setting, options.warmup)
    print("answer ready", flush=True)
    for line in sys.stdin:
        question = line.strip()
        if question not in QUESTIONS:
            raise SystemExit(f"expected one of {', '.join(QUESTIONS)}, got {line!r}")
        found = QUESTIONS[question](contestant, device, options.steps)
        print(f"answer {json.dumps(found)}", flush=True)


def seconds_of_block(contestant: Contestant, device: torch.device, steps: int) -> float:
    """By the clock, between two synchronisations."""
    found: Any = time_block(contestant, device, steps)
    # Later trees also say what the cores spent on the block.
    seconds: float = found[0] if isinstance(found, tuple) else found
    return seconds


def count_calls(contestant: Contestant, device: torch.device, steps: int) -> int:
    """Python calls of one step: what the host has to do, whatever its speed."""
    assert contestant.step is not None
    profiler = cProfile.Profile()
    profiler.runcall(contestant.step, contestant.batch)
    return pstats.Stats(profiler).total_calls  # type: ignore[attr-defined, no-any-return]


def profiled(contestant: Contestant, steps: int) -> profile:
    """A block under torch's profiler, of the device alone."""
    assert contestant.step is not None
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            contestant.step(contestant.batch)
        torch.cuda.synchronize()
    return profiler


def count_launches(contestant: Contestant, device: torch.device, steps: int) -> dict[str, int]:
    """Calls of CUDA in a block, by name: launches, copies, and waits for the device."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiled(contestant, steps).export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return dict(Counter(event["name"] for event in events if event.get("cat") in CUDA_CALLS))


def time_kernels(contestant: Contestant, device: torch.device, steps: int) -> float:
    """Seconds of all kernels of a block, added up: what the GPU has to do, whatever its host."""
    events = profiled(contestant, steps).key_averages()
    return 1e-6 * sum(event.self_device_time_total for event in events)


QUESTIONS: dict[str, Callable[[Contestant, torch.device, int], Any]] = {
    "block": seconds_of_block,
    "calls": count_calls,
    "launches": count_launches,
    "kernels": time_kernels,
}


if __name__ == "__main__":
    main()
