"""Times whole training steps side by side and writes the numbers as JSON.

python -m benchmarks.step --suite headline --json benchmarks/reports/NAME.json
python -m benchmarks.step --workload gpt2-small-8x64 --adapters plain ours opacus:ghost --apart
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

import torch

from benchmarks.adapters import ADAPTERS, Setting
from benchmarks.apart import ApartContest
from benchmarks.measure import Contest, Measurement
from benchmarks.results import add, document_of, environment, new_run
from benchmarks.workloads import DEFAULT_ADAPTERS, SUITES, workload


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--suite", choices=sorted(SUITES), action="append", default=[])
    parser.add_argument("--workload", nargs="*", default=[], help="e.g. gpt2-32x128")
    parser.add_argument(
        "--adapters", nargs="*", choices=ADAPTERS, metavar="ADAPTER",
        help=f"of {', '.join(ADAPTERS)}; a suite has its own default, else all",
    )  # fmt: skip
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--float32", action="store_true", help="no bfloat16 autocast, which a CPU never has"
    )
    parser.add_argument("--tf32", action="store_true", help="let a model's products run in TF32")
    parser.add_argument("--warmup", type=int, default=5, help="steps before any timing")
    parser.add_argument("--rounds", type=int, default=8, help="blocks of every adapter")
    parser.add_argument("--steps", type=int, default=10, help="steps a block")
    parser.add_argument(
        "--prepare-seconds", type=float, default=float("inf"), metavar="S",
        help="a workload's adapters that are not prepared by then have failed",
    )  # fmt: skip
    parser.add_argument(
        "--apart", action="store_true",
        help="a process for each adapter: on a CPU they would share a heap, which one may have "
        "made faster for another",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, help="add the numbers to this file")
    options = parser.parse_args()
    if min(options.rounds, options.steps) < 1:
        parser.error("--rounds and --steps: expected at least 1")
    return options


def planned(options: argparse.Namespace) -> dict[str, tuple[str, ...]]:
    """The adapters of every workload asked for."""
    plan: dict[str, tuple[str, ...]] = {}
    for suite in options.suite:
        for name in SUITES[suite]:
            plan.setdefault(name, tuple(options.adapters or DEFAULT_ADAPTERS[suite]))
    for name in options.workload:
        plan.setdefault(name, tuple(options.adapters or ADAPTERS))
    return plan


def show(found: Measurement) -> None:
    name = f"{found.workload:20} {found.adapter:16}"
    if found.error is not None:
        print(f"{name} failed after {found.preparation_seconds:.0f} s: {found.error}", flush=True)
        return
    against = ""
    for baseline, ratios in found.round_ratios.items():
        if baseline != found.adapter:
            median, low, high = statistics.median(ratios), min(ratios), max(ratios)
            against += f"  {median:.2f} ({low:.2f}-{high:.2f}) of {baseline}"
    memory = f" {found.peak_gib:7.2f} GiB" if found.peak_gib is not None else ""
    busy = f", busy {1e3 * found.busy_seconds:8.2f} ms" if found.busy_seconds is not None else ""
    print(
        f"{name} {1e3 * found.step_seconds:8.2f} ms{busy}, host "
        f"{1e3 * statistics.median(found.host_seconds):8.2f} ms{memory}, prepared in "
        f"{found.preparation_seconds:4.0f} s{against}",
        flush=True,
    )


def main() -> int:
    options = arguments()
    plan = planned(options)
    device = torch.device(options.device)
    # Few CPUs multiply bfloat16 any faster, and some die of it.
    bfloat16 = device.type != "cpu" and not options.float32
    torch.set_float32_matmul_precision("high" if options.tf32 else "highest")
    name = new_run()
    found: list[Measurement] = []
    facts = environment(device, bfloat16=bfloat16)
    for named, adapters in plan.items():
        setting = Setting(workload=workload(named), device=device, bfloat16=bfloat16)
        contest = (ApartContest if options.apart else Contest)(setting, adapters)
        try:
            contest.prepare(warmup=options.warmup, limit_seconds=options.prepare_seconds)
            contest.time(rounds=options.rounds, steps=options.steps)
            fresh = contest.measurements(run=name, steps=options.steps)
            found += fresh
            if options.json:
                add(options.json, document_of(name, facts, found, contest.routes()))
        finally:
            contest.close()
        for entry in fresh:
            show(entry)
        torch.compiler.reset()
    ours_failed = any(e.error and e.adapter.startswith(("ours", "plain")) for e in found)
    return 1 if ours_failed else 0


if __name__ == "__main__":
    sys.exit(main())
