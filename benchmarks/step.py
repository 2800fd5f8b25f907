"""Times whole training steps side by side in one process and writes the numbers as JSON.

python -m benchmarks.step --suite headline --json benchmarks/reports/NAME.json
python -m benchmarks.step --workload gpt2-small-8x64 --adapters plain ours opacus:ghost
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import sys
from pathlib import Path

import torch

from benchmarks.adapters import ADAPTERS, Setting
from benchmarks.measure import Measurement, measure
from benchmarks.workloads import SUITES, workload


def environment(device: torch.device) -> dict[str, object]:
    """What the numbers depend on."""
    versions: dict[str, str | None] = {}
    for package in ("torch", "triton", "transformers", "opacus"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    hardware = platform.processor() or platform.machine()
    if device.type == "cuda":
        hardware = torch.cuda.get_device_name(device)
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "hardware": hardware,
        "cpu_cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "versions": versions,
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--suite", choices=sorted(SUITES), action="append", default=[])
    parser.add_argument("--workload", nargs="*", default=[], help="e.g. gpt2-32x128")
    parser.add_argument("--adapters", nargs="*", default=list(ADAPTERS))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--float32", action="store_true", help="no bfloat16 autocast")
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10, help="steps a block")
    parser.add_argument("--json", type=Path, help="add the numbers to this file")
    return parser.parse_args()


def show(found: Measurement, baseline: Measurement | None) -> None:
    if found.error is not None:
        print(f"{found.workload:22} {found.adapter:18} {found.error}", flush=True)
        return
    spread = (max(found.block_seconds) - min(found.block_seconds)) / found.seconds
    ratio = baseline.seconds / found.seconds if baseline else float("nan")
    memory = f"{found.peak_gib:7.2f} GiB" if found.peak_gib is not None else ""
    print(
        f"{found.workload:22} {found.adapter:18} {1e3 * found.seconds:9.2f} ms ±{spread:4.0%} "
        f"{found.batch_size / found.seconds:9.1f}/s  {ratio:5.2f} of plain {memory}",
        flush=True,
    )


def write(path: Path, environment: dict[str, object], found: list[Measurement]) -> None:
    """Write every measurement so far, keeping those of earlier runs with other names."""
    measurements = [entry.to_json() for entry in found]
    fresh = {(entry["workload"], entry["adapter"]) for entry in measurements}
    notes: list[str] = []
    if path.exists():
        earlier = json.loads(path.read_text())
        notes = earlier.get("notes", [])
        measurements = [
            entry
            for entry in earlier["measurements"]
            if (entry["workload"], entry["adapter"]) not in fresh
        ] + measurements
    document = {"environment": environment, "notes": notes, "measurements": measurements}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")


def main() -> int:
    options = arguments()
    device = torch.device(options.device)
    names = [name for suite in options.suite for name in SUITES[suite]] + options.workload
    facts = {**environment(device), "bfloat16_autocast": not options.float32}
    found: list[Measurement] = []
    for name in dict.fromkeys(names):
        setting = Setting(workload=workload(name), device=device, bfloat16=not options.float32)
        baseline = None
        for adapter in options.adapters:
            result = measure(
                adapter,
                setting,
                warmup=options.warmup,
                blocks=options.blocks,
                steps=options.steps,
            )
            baseline = result if adapter == "plain" else baseline
            show(result, baseline)
            found.append(result)
            if options.json:
                write(options.json, facts, found)
            torch.compiler.reset()
    return 0


if __name__ == "__main__":
    sys.exit(main())
