"""One of the processes of `benchmarks.versions`: prepares a step, and times a block when asked.

It runs with the package and the benchmarks of whichever tree is on its path, so it uses only what
both states of the code have.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import sys
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.adapters import Setting
from benchmarks.measure import Contestant, prepare, time_block
from benchmarks.workloads import workload


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
        if line.strip() not in ("block", "calls", "kernels"):
            raise SystemExit(f"expected the word block, calls or kernels, got {line!r}")
        if line.strip() == "calls":
            print(f"answer {count_calls(contestant)}", flush=True)
            continue
        if line.strip() == "block":
            # Later trees also say what the cores spent on the block.
            found: Any = time_block(contestant, device, options.steps)
            seconds = found[0] if isinstance(found, tuple) else found
        else:
            seconds = time_kernels(contestant, options.steps)
        print(f"answer {seconds!r}", flush=True)


def count_calls(contestant: Contestant) -> int:
    """Python calls of one step: what the host has to do, whatever its speed."""
    assert contestant.step is not None
    profiler = cProfile.Profile()
    profiler.runcall(contestant.step, contestant.batch)
    return pstats.Stats(profiler).total_calls  # type: ignore[attr-defined, no-any-return]


def time_kernels(contestant: Contestant, steps: int) -> float:
    """Seconds of all kernels of a block, added up: what the GPU has to do, whatever its host."""
    assert contestant.step is not None
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            contestant.step(contestant.batch)
        torch.cuda.synchronize()
    return 1e-6 * sum(event.self_device_time_total for event in profiler.key_averages())


if __name__ == "__main__":
    main()
