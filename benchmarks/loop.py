"""Times whole training runs, from the start of a process to its last step.

python -m benchmarks.loop --workload sst2 e2e images --data DIR --model DIR --json loops.json

Poisson batches with the lengths that the data have, private (`make_private`, shuffled after every
step) against plain loops, eager and compiled. `--data` holds the folders `sst2` and `e2e`;
`--model` is a folder with a BERT and its tokenizer. `images` and `texts` are made up and need
neither. Every side runs in a process of its own, one
after the other. A cold run begins with empty caches of compiled kernels, a warm one with those
that the cold run left. Ratios compare sides of one round with equally filled caches. A run that
reaches `--limit-seconds` ends with the step it is at, and says how many it took; one whose step
does not end within a minute more has failed. Every result is saved before the next run begins.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.results import environment, save
from benchmarks.run_side import SIDES
from benchmarks.run_tasks import MADE_UP, PHYSICAL, encode

DEFAULT_SIDES = SIDES[:3]
CACHES = ("cold", "warm")
# Steps that count as the beginning, in which kernels may be compiled and work recorded.
BEGINNING = 20
# How long a step may go on after the limit.
GRACE_SECONDS = 60.0
CACHE_VARIABLES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
Result = dict[str, Any]


def run_side(
    options: argparse.Namespace, workload: str, side: str, encoded: Path | None, caches: Path
) -> Result:
    """One process; what it measured, or how it failed."""
    variables = {name: str(caches / name.lower()) for name in CACHE_VARIABLES}
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "result.json"
        command = [
            sys.executable, "-m", "benchmarks.run_side", "--side", side, "--workload", workload,
            "--logical", str(options.logical), "--steps", str(options.steps),
            "--physical", str(options.physical or min(PHYSICAL[workload], options.logical)),
            "--device", options.device, "--output", str(output),
            "--limit-seconds", str(options.limit_seconds),
        ]  # fmt: skip
        if encoded is not None:
            command += ["--encoded", str(encoded), "--model", str(options.model)]
        if options.records is not None:
            command += ["--records", str(options.records)]
        if options.device != "cpu" or side.endswith(":compiled"):
            command += ["--pads"]  # shapes that come again are worth it there
        command += ["--started", repr(time.time())]
        try:
            done = subprocess.run(
                command, env=os.environ | variables, check=False, capture_output=True, text=True,
                timeout=options.limit_seconds + GRACE_SECONDS,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return {"error": f"a step not done {GRACE_SECONDS:.0f} s after the limit"}
        if done.returncode != 0:
            return {"error": done.stderr[-4000:]}
        found: Result = json.loads(output.read_text())
    return summarised(found)


def summarised(found: Result) -> Result:
    """What was measured, with the figures that people ask for."""
    ends, samples, began = found["step_ends"], found["samples"], found["loop_began"]
    begin = min(BEGINNING, len(ends) // 2)
    later_samples = sum(samples[begin:])
    return found | {
        "samples_per_second": sum(samples) / (found["loop_ended"] - began),
        "samples_per_second_from_start": sum(samples) / found["loop_ended"],
        "samples_per_second_later": later_samples
        / (found["loop_ended"] - (ends[begin - 1] if begin else began)),
        "samples_per_cpu_second_later": later_samples
        / (found["cpu_seconds"][-1] - (found["cpu_seconds"][begin - 1] if begin else 0.0)),
        "first_step_seconds": ends[0] - began,
        "first_step_ends_at": ends[0],
    }


def described(result: Result) -> str:
    """One line about a run."""
    if "error" in result:
        return f"failed: {result['error'].strip().splitlines()[-1]}"
    words = [
        f"{len(result['step_ends'])} steps, {result['samples_per_second']:,.0f} samples/s "
        f"({result['samples_per_second_later']:,.0f} after the beginning), "
        f"first step {result['first_step_seconds']:.1f} s",
    ]
    parts = sorted(result["seconds_by_part"].items(), key=lambda part: -part[1])
    words.append(", ".join(f"{name} {seconds:.1f} s" for name, seconds in parts))
    words.append(f"{len(result['shapes'])} shapes")
    return "; ".join(words)


def compared(result: Result, plain: Result) -> str:
    """How fast a run was beside a plain one, and how much longer it took to begin."""
    keys = ("samples_per_second", "samples_per_second_later", "samples_per_second_from_start")
    whole, later, process = (result[key] / plain[key] for key in keys)
    begin = result["first_step_seconds"] - plain["first_step_seconds"]
    by_cpu = result["samples_per_cpu_second_later"] / plain["samples_per_cpu_second_later"]
    return (
        f"{whole:.2f} of its speed, {later:.2f} after the beginning ({by_cpu:.2f} by the time its "
        f"cores took), {process:.2f} with the start of the process; first step {begin:+.1f} s"
    )


def print_ratios(round_results: list[Result]) -> None:
    """Every run of one round beside the plain ones with equally filled caches."""
    done = [result for result in round_results if "error" not in result]
    for plain in done:
        others = [r for r in done if r["cache"] == plain["cache"] and r is not plain]
        for result in others if plain["side"].startswith("plain") else ():
            names = f"{result['workload']}, {result['cache']}: {result['side']} / {plain['side']}"
            print(f"{names}: {compared(result, plain)}", flush=True)


def run_workload(options: argparse.Namespace, workload: str, results: list[Result]) -> None:
    """All sides in all rounds, each result printed and saved as it comes."""
    with tempfile.TemporaryDirectory() as folder:
        encoded = None
        if workload not in MADE_UP:
            encoded = Path(folder) / "records.npz"
            encode(workload, options.data, options.model, encoded, options.records)
        for number in range(options.rounds):
            sides = options.sides[::-1] if number % 2 else options.sides
            for side in sides:
                shutil.rmtree(Path(folder) / side, ignore_errors=True)
            before = len(results)
            for cache, side in itertools.product(options.caches, sides):
                found = run_side(options, workload, side, encoded, Path(folder) / side)
                heading = {"workload": workload, "side": side, "cache": cache, "round": number}
                results.append(heading | found)
                print(f"{workload}, {side}, {cache}: {described(found)}", flush=True)
                write(options, results)
            print_ratios(results[before:])


def write(options: argparse.Namespace, results: list[Result]) -> None:
    if options.json is None:
        return
    device = torch.device(options.device)
    settings = {k: str(v) for k, v in vars(options).items() if k not in ("data", "model", "json")}
    document = {
        "environment": environment(device, bfloat16=device.type == "cuda"),
        "settings": settings,
        "results": results,
    }
    save(options.json, document)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workload", nargs="+", choices=tuple(PHYSICAL), default=["sst2"])
    parser.add_argument("--data", type=Path, help="a folder with the folders sst2 and e2e")
    parser.add_argument("--model", type=Path, help="a folder with a BERT and its tokenizer")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(DEFAULT_SIDES))
    parser.add_argument("--caches", nargs="+", choices=CACHES, default=list(CACHES))
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--logical", type=int, default=1000, help="expected size of a drawn batch")
    parser.add_argument("--physical", type=int, help="samples at once; by default by workload")
    parser.add_argument("--records", type=int, help="use only so many records")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--limit-seconds", type=float, default=1800.0, help="for one run")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    options = parser.parse_args()
    if min(options.steps, options.logical, options.rounds, options.physical or 1) < 1:
        parser.error("--steps, --logical, --physical and --rounds: expected at least 1")
    for workload in set(options.workload) - MADE_UP:
        if options.data is None or not (options.data / workload).is_dir():
            parser.error(f"--data: expected a folder with a folder {workload} in it")
        if options.model is None or not options.model.is_dir():
            parser.error("--model: expected the folder of a BERT with its tokenizer")
    return options


def main() -> int:
    options = parsed()
    results: list[Result] = []
    for workload in options.workload:
        run_workload(options, workload, results)
    return 1 if any("error" in result for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
