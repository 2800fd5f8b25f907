"""Compares the steps of two states of the code, block by block in turns.

git worktree add ../before COMMIT
python -m benchmarks.versions --before ../before --workload gpt2-32x128 --json FILE

Four processes prepare the same step: two with the code of `--before`, two with this tree's. Only
one of them computes at a time. Two with the same code say how far its figures differ on this host.
By the clock a process may be slower than its twin for as long as it lives, so beside the clock
stands what a host cannot change: calls in Python, calls of CUDA, and the time of the kernels.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any, TextIO

import torch

from benchmarks.results import environment

HERE = Path(__file__).resolve().parent
WORKER = HERE / "versions_worker.py"
CONTESTANTS = ("before", "after", "before again", "after again")
Result = dict[str, Any]


class Worker:
    """A process that times one block of steps whenever it is asked to."""

    def __init__(self, tree: Path, options: argparse.Namespace, workload: str, adapter: str):
        command = [
            sys.executable, str(WORKER), "--workload", workload, "--adapter", adapter,
            "--steps", str(options.steps), "--warmup", str(options.warmup),
            "--device", options.device,
        ]  # fmt: skip
        # Packages that are not part of the tree may be on the path already.
        path = os.pathsep.join([str(tree / "src"), str(tree), os.environ.get("PYTHONPATH", "")])
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=tree,
            env=os.environ | {"PYTHONPATH": path, "PYTHONSAFEPATH": "1"},
        )  # fmt: skip

    def answer(self) -> str:
        output: TextIO | None = self._process.stdout
        assert output is not None
        for line in output:
            if line.startswith("answer "):
                return line.removeprefix("answer ").strip()
        raise RuntimeError(f"a worker ended early, with exit code {self._process.wait()}")

    def measured(self, what: str) -> Any:
        """What one of the questions of `versions_worker` is answered with."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{what}\n")
        self._process.stdin.flush()
        return json.loads(self.answer())

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def compared(options: argparse.Namespace, workload: str, adapter: str) -> Result:
    """The blocks of all four, and how the others' compare with those of "before"."""
    trees = {
        name: options.before if name.startswith("before") else HERE.parent for name in CONTESTANTS
    }
    workers: dict[str, Worker] = {}
    blocks: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
    kernels: dict[str, float] = {}
    launches: dict[str, dict[str, int]] = {}
    try:
        for name, tree in trees.items():
            workers[name] = Worker(tree, options, workload, adapter)
        for worker in workers.values():
            worker.answer()
        for number in range(options.rounds):
            first = number % len(CONTESTANTS)
            for name in CONTESTANTS[first:] + CONTESTANTS[:first]:
                blocks[name].append(workers[name].measured("block"))
        calls = {name: worker.measured("calls") for name, worker in workers.items()}
        if options.device != "cpu":
            launches = {name: worker.measured("launches") for name, worker in workers.items()}
            kernels = {name: worker.measured("kernels") for name, worker in workers.items()}
    finally:
        for worker in workers.values():
            worker.close()
    return {
        "workload": workload,
        "adapter": adapter,
        "steps_per_block": options.steps,
        "block_seconds": blocks,
        "kernel_seconds_of_a_block": kernels,
        "python_calls_of_a_step": calls,
        "cuda_calls_of_a_block": launches,
        "of_before": {
            name: summarised(
                [mine / base for mine, base in zip(found, blocks["before"], strict=True)]
            )
            for name, found in blocks.items()
            if name != "before"
        },
    }


def summarised(ratios: list[float]) -> Result:
    low, *_, high = statistics.quantiles(ratios, n=10)
    return {"median": statistics.median(ratios), "tenth": low, "ninetieth": high}


def shown(result: Result) -> str:
    step = statistics.median(result["block_seconds"]["before"]) / result["steps_per_block"]
    words = [f"{result['workload']} {result['adapter']}: {1e3 * step:.2f} ms before"]
    for name, ratios in result["of_before"].items():
        spread = f"{ratios['tenth']:.3f} to {ratios['ninetieth']:.3f}"
        words.append(f"{name} {ratios['median']:.4f} of it (middle 80 %: {spread})")
        made = result["python_calls_of_a_step"]
        words.append(f"its Python calls {made[name]:,} instead of {made['before']:,}")
        if kernels := result["kernel_seconds_of_a_block"]:
            words.append(f"its kernels {kernels[name] / kernels['before']:.4f}")
            of_cuda = result["cuda_calls_of_a_block"]
            cuda = {who: sum(found.values()) for who, found in of_cuda.items()}
            words.append(f"its calls of CUDA {cuda[name]:,} instead of {cuda['before']:,}")
    return "; ".join(words)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", type=Path, required=True, help="a tree of the earlier code")
    parser.add_argument("--workload", nargs="+", required=True, help="e.g. gpt2-32x128")
    parser.add_argument("--adapters", nargs="+", default=["ours"])
    parser.add_argument("--rounds", type=int, default=20, help="blocks of each process")
    parser.add_argument("--steps", type=int, default=5, help="steps a block")
    parser.add_argument("--warmup", type=int, default=8, help="steps before any timing")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    options = parser.parse_args()
    options.before = options.before.resolve()
    if not (options.before / "benchmarks" / "measure.py").is_file():
        parser.error("--before: expected a tree of this project, with its benchmarks")
    if options.rounds < 2 or options.steps < 1:
        parser.error("--rounds: expected at least 2; --steps: at least 1")
    return options


def main() -> None:
    options = parsed()
    device = torch.device(options.device)
    results: list[Result] = []
    for workload in options.workload:
        for adapter in options.adapters:
            results.append(compared(options, workload, adapter))
            print(shown(results[-1]), flush=True)
            if options.json is not None:
                facts = environment(device, bfloat16=device.type == "cuda")
                document = {"environment": facts, "results": results}
                options.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
