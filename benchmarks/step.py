"""Times whole training steps side by side and writes the numbers as JSON.

    python -m benchmarks.step --suite headline --json benchmarks/reports/NAME.json
    python -m benchmarks.step --workload gpt2-small-8x64 --adapters plain ours opacus:ghost
    git worktree add ../before COMMIT
    python -m benchmarks.step --workload bert-small-8x64 --adapters ours --before ../before

A host's speed changes from minute to minute by more than the differences of interest. So every side
runs one block of steps in every round, each round begins with another side, and sides are compared
within rounds only. Each has a process of its own, for sides in one process share a heap, and only
one process computes at a time. With `--before` every adapter is also run twice with the code of
another tree: two sides of the same code say how far figures differ on this host.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from multiprocessing import Pipe
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import torch

from benchmarks.adapters import ADAPTERS
from benchmarks.report import describe
from benchmarks.results import Document, add, new_run
from benchmarks.workloads import DEFAULT_ADAPTERS, SUITES

HERE = Path(__file__).resolve().parent
BEFORE, AGAIN = "@before", "@before again"
# Whom the others are compared with; besides, every side of an earlier tree.
BASELINES = ("plain", "plain:compiled", "opacus:ghost", "opake")
HOST_STEPS = 5
Entry = dict[str, Any]


class SideError(RuntimeError):
    """What a side's process raised, as text, or that it is no more."""


class Asked(Protocol):
    """Where a side is: it answers the questions of `benchmarks.worker.Side`."""

    def ask(self, question: str, *numbers: int, limit_seconds: float | None = None) -> Any: ...

    def close(self) -> None: ...


class Worker:
    """A side in a process of its own, with the code of one tree; `variables` are its alone."""

    def __init__(
        self,
        options: argparse.Namespace,
        name: str,
        side: str,
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        adapter, at, _ = side.partition("@")
        tree = options.before if at else HERE.parent
        self._pipe, there = Pipe()
        command = [
            sys.executable, str(HERE / "worker.py"), "--workload", name, "--adapter", adapter,
            "--device", options.device, "--pipe", str(there.fileno()),
            *(["--bfloat16"] if computes_in_bfloat16(options) else []),
            *(["--tf32"] if options.tf32 else []),
        ]  # fmt: skip
        path = os.pathsep.join([str(tree / "src"), str(tree), os.environ.get("PYTHONPATH", "")])
        given = {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1", **variables}
        self._process = subprocess.Popen(command, cwd=tree, env=given, pass_fds=[there.fileno()])
        there.close()

    def ask(self, question: str, *numbers: int, limit_seconds: float | None = None) -> Any:
        try:
            self._pipe.send((question, numbers))
            if not self._pipe.poll(limit_seconds):
                # Nobody waits for it any more, and it would compute while others are timed.
                self.close()
                raise SideError(f"no answer within {limit_seconds:.0f} s")
            is_error, answer = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise SideError("its process has ended") from error
        if is_error:
            raise SideError(answer)
        return answer

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


class Contest:
    """All sides of one workload; a side that fails is left out from then on."""

    def __init__(self, sides: Mapping[str, Asked]) -> None:
        self._sides = dict(sides)
        self.found: dict[str, Entry] = {
            side: {
                "preparation_seconds": 0.0, "peak_gib": None, "step_peak_gib": None,
                "environment": {}, "host_seconds": [], "block_seconds": [], "core_seconds": [],
                "busy_seconds": None, "python_calls": None, "error": None,
            }
            for side in sides
        }  # fmt: skip

    def prepare(self, *, warmup: int, limit_seconds: float | None) -> None:
        """Build and warm up every side, so that nothing is compiled later."""
        for side in self._running():
            self.prepare_side(side, warmup=warmup, limit_seconds=limit_seconds)

    def prepare_side(self, side: str, *, warmup: int, limit_seconds: float | None) -> None:
        """Build and warm up one side."""
        start = time.monotonic()
        self.found[side] |= self._ask(side, "prepare", warmup, limit=limit_seconds) or {}
        self.found[side]["preparation_seconds"] = time.monotonic() - start

    def time(self, *, rounds: int, steps: int, traces: bool = True) -> None:
        """Run every side once per round, each round beginning with another one.

        Traces tell how long a GPU is busy, and how many calls Python makes.
        """
        for side in self._running():
            self._ask(side, "block", 1)  # the first step after a pause is slower than the others
            hosts = [self._ask(side, "host") for _ in range(HOST_STEPS)]
            self.found[side]["host_seconds"] = [seconds for seconds in hosts if seconds is not None]
        for number in range(rounds):
            order = self._running()
            first = number % max(1, len(order))
            for side in order[first:] + order[:first]:
                if (answer := self._ask(side, "block", steps)) is not None:
                    self.found[side]["block_seconds"].append(answer[0])
                    self.found[side]["core_seconds"].append(answer[1])
        for side in self._running() if traces else ():
            self.found[side]["busy_seconds"] = self._ask(side, "busy")
            self.found[side]["python_calls"] = self._ask(side, "calls")

    def close(self) -> None:
        for side in self._sides.values():
            side.close()

    def _running(self) -> list[str]:
        return [side for side, entry in self.found.items() if entry["error"] is None]

    def _ask(self, side: str, question: str, *numbers: int, limit: float | None = None) -> Any:
        """The answer; None for a side that has failed, now or before."""
        if self.found[side]["error"] is not None:
            return None
        try:
            return self._sides[side].ask(question, *numbers, limit_seconds=limit)
        except SideError as error:
            self.found[side]["error"] = str(error)
            return None


def round_ratios(side: str, blocks: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """Throughput of `side` over each baseline's, round by round, while both ran."""
    found = {
        baseline: [
            theirs / mine for mine, theirs in zip(blocks[side], blocks[baseline], strict=False)
        ]
        for baseline in blocks
        if baseline in BASELINES or baseline.endswith(BEFORE)
    }
    return {baseline: ratios for baseline, ratios in found.items() if ratios}


def document_of(run: str, name: str, steps: int, found: Mapping[str, Entry]) -> Document:
    """What one workload gave in one run of the command."""
    blocks = {side: entry["block_seconds"] for side, entry in found.items()}
    facts: Entry = {}
    measurements = []
    for side, entry in found.items():
        environment = dict(entry.pop("environment"))
        heading = {"run": run, "workload": name, "adapter": side, "steps": steps}
        taken = {"backends": environment.pop("backends", {})}
        ratios = round_ratios(side, blocks)
        measurements.append({**heading, **entry, "round_ratios": ratios, **taken})
        facts = facts or environment
    return {"runs": {run: facts}, "notes": [], "measurements": measurements}


def computes_in_bfloat16(options: argparse.Namespace) -> bool:
    """Few CPUs multiply bfloat16 any faster, and some die of it."""
    return not options.float32 and not options.device.startswith("cpu")


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--suite", choices=sorted(SUITES), action="append", default=[])
    parser.add_argument("--workload", nargs="*", default=[], help="e.g. gpt2-32x128")
    parser.add_argument(
        "--adapters", nargs="*", choices=ADAPTERS, metavar="ADAPTER",
        help=f"of {', '.join(ADAPTERS)}; a suite has its own default, else all",
    )  # fmt: skip
    parser.add_argument("--before", type=Path, metavar="TREE", help="a tree of earlier code")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--float32", action="store_true", help="no bfloat16 autocast, which a CPU never has"
    )
    parser.add_argument("--tf32", action="store_true", help="let a model's products run in TF32")
    parser.add_argument("--warmup", type=int, default=5, help="steps before any timing")
    parser.add_argument("--rounds", type=int, default=8, help="blocks of every side")
    parser.add_argument("--steps", type=int, default=10, help="steps a block")
    parser.add_argument(
        "--prepare-seconds", type=float, metavar="S",
        help="a side that is not prepared within so long has failed",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, help="add the numbers to this file")
    options = parser.parse_args(given)
    if min(options.rounds, options.steps) < 1:
        parser.error("--rounds and --steps: expected at least 1")
    if options.before is not None:
        options.before = options.before.resolve()
        if not (options.before / "benchmarks" / "workloads.py").is_file():
            parser.error("--before: expected a tree of this project, with its benchmarks")
    return options


def planned(options: argparse.Namespace) -> dict[str, list[str]]:
    """The sides of every workload asked for."""
    plan: dict[str, Sequence[str]] = {}
    for suite in options.suite:
        for name in SUITES[suite]:
            plan.setdefault(name, options.adapters or DEFAULT_ADAPTERS[suite])
    for name in options.workload:
        plan.setdefault(name, options.adapters or ADAPTERS)
    ends = ["", BEFORE, AGAIN] if options.before is not None else [""]
    return {name: [a + end for a in adapters for end in ends] for name, adapters in plan.items()}


def main(given: Sequence[str] | None = None) -> int:
    options = arguments(given)
    run, failed = new_run(), False
    for name, sides in planned(options).items():
        contest = Contest({side: Worker(options, name, side) for side in dict.fromkeys(sides)})
        try:
            contest.prepare(warmup=options.warmup, limit_seconds=options.prepare_seconds)
            contest.time(rounds=options.rounds, steps=options.steps)
        finally:
            contest.close()
        document = document_of(run, name, options.steps, contest.found)
        if options.json:
            add(options.json, document)
        for entry in document["measurements"]:
            print(describe(entry), flush=True)
            failed |= entry["error"] is not None and not entry["adapter"].startswith(
                ("opacus", "opake")
            )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
