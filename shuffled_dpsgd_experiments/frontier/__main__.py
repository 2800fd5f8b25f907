"""Runs workloads of the frontier, for long runs in the background; `reproduce frontier` draws."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import torch

from shuffled_dpsgd_experiments.frontier.running import cells_of, run
from shuffled_dpsgd_experiments.frontier.workloads import WORKLOADS


def main() -> int:
    """Exit status 3 says that cells are missing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workloads", nargs="+", choices=[*WORKLOADS])
    parser.add_argument("--data", type=Path, help="a folder with sst2 in it")
    parser.add_argument("--results", type=Path, default=Path("results"))
    parser.add_argument("--claims", type=float, nargs="+", help="run these claimed ε alone")
    parser.add_argument("--stop-after", type=float, metavar="SECONDS")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    complete = True
    for name in chosen.workloads:
        workload = WORKLOADS[name]
        if chosen.claims is not None:
            workload = replace(workload, claims=tuple(chosen.claims))
        material = workload.load(chosen.data)
        cells = cells_of(workload, chosen.results)

        def say(line: str) -> None:
            print(line, flush=True)

        complete &= run(workload, material, cells, say=say, stop_after=chosen.stop_after)
    return 0 if complete else 3


if __name__ == "__main__":
    sys.exit(main())
