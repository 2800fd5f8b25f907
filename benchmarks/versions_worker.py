"""One of the processes of `benchmarks.versions`: prepares a step, and times a block when asked.

It runs with the package and the benchmarks of whichever tree is on its path, so it uses only what
both states of the code have.
"""

from __future__ import annotations

import argparse
import sys

import torch

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
        if line.strip() != "block":
            raise SystemExit(f"expected the word block, got {line!r}")
        print(f"answer {time_block(contestant, device, options.steps)!r}", flush=True)


if __name__ == "__main__":
    main()
