"""Says where the time of the first steps of a run goes: compilation, trials, checks, settling.

    python -m benchmarks.first_steps --workload sst2 --data DIR --model DIR --steps 6

Every event that takes more than a few hundredths of a second is printed as it ends, with the
seconds since the start of the process. After each of the first steps, the places where the main
thread was found every 10 ms. Whether kernels have to be compiled depends on `TRITON_CACHE_DIR`,
whether they are tried on `SHUFFLED_DPSGD_CACHE`: empty folders there make a cold start.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import run_side, run_tasks
from shuffled_dpsgd.clipping.checks.batch_axis import BatchAxisCheck
from shuffled_dpsgd.clipping.checks.loss_independence import LossCheck
from shuffled_dpsgd.clipping.checks.standing import StandingCheck
from shuffled_dpsgd.clipping.replay.recordings import GraphRecorder
from shuffled_dpsgd.clipping.settle.schedules import WholeGradient
from shuffled_dpsgd.core.release import Releases
from shuffled_dpsgd.runtime.attention import without_cudnn_attention
from shuffled_dpsgd.runtime.backends import Backend
from shuffled_dpsgd.training.shuffle_check import ShuffleCheck
from shuffled_dpsgd.training.shuffling import Shuffling

BEGAN = time.time()
LEAST_SECONDS = 0.03
# Steps after which the main thread's places are printed, and the share of a step worth printing.
NUM_SHOWN, LEAST_SHARE = 3, 0.02
EVENTS: list[tuple[type, str, str]] = [
    (BatchAxisCheck, "run", "check of the batch axis"),
    (LossCheck, "run", "check of the losses"),
    (StandingCheck, "book", "standing check, booking"),
    (StandingCheck, "settle", "standing check"),
    (WholeGradient, "finish", "settling"),
    (GraphRecorder, "__call__", "recording"),
    (ShuffleCheck, "try_out", "trial of the shuffle"),
    (Releases, "make", "noise and update"),
    (Shuffling, "permute", "shuffle"),
    (Backend, "_judge", "probe of a backend"),
]


def say(text: str) -> None:
    print(f"[{time.time() - BEGAN:7.2f}] {text}", flush=True)


def timed(work: Callable[..., Any], label: Callable[..., str], seconds: list[float]) -> Any:
    """`work`, with a line when it ends, unless it took no time."""

    def watched(*args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        try:
            return work(*args, **kwargs)
        finally:
            took = time.perf_counter() - begin
            seconds.append(took)
            if took > LEAST_SECONDS:
                say(f"{label(*args)}: {took:.2f} s")

    return watched


def watch_events() -> list[float]:
    """Have all events told of; returns the list that the seconds of compilations go to."""
    for owner, name, label in EVENTS:
        setattr(owner, name, timed(getattr(owner, name), lambda *_, label=label: label, []))
    compilations: list[float] = []
    try:
        from triton.runtime.jit import JITFunction
    except ImportError:
        return compilations
    method = JITFunction._do_compile
    JITFunction._do_compile = timed(
        method, lambda kernel, *_: f"compiled or read: {kernel.fn.__name__}", compilations
    )
    return compilations


class Sampler(threading.Thread):
    """Notes where the main thread is, every 10 ms."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._found: Counter[tuple[str, ...]] = Counter()

    def run(self) -> None:
        while True:
            time.sleep(0.01)
            frame: Any = sys._current_frames().get(threading.main_thread().ident or 0)
            path: list[str] = []
            while frame is not None:
                file = frame.f_code.co_filename
                if "shuffled_dpsgd" in file or "triton" in file:
                    path.append(f"{Path(file).stem}.{frame.f_code.co_name}")
                frame = frame.f_back
            for depth in range(1, len(path) + 1):
                self._found[tuple(path[::-1][:depth])] += 1

    def show(self) -> None:
        """Print the places found since the last time, as a tree."""
        found, self._found = self._found, Counter()
        whole = max(found.values(), default=0)
        for path, count in sorted(found.items()):
            if count > max(2, LEAST_SHARE * whole):
                print(f"{'  ' * len(path)}{count / 100:.2f} {path[-1]}")
        sys.stdout.flush()


class ShownLog(run_side.Log):
    """Tells of every step, and where the first ones went."""

    def __init__(self, sampler: Sampler) -> None:
        super().__init__(started=BEGAN)
        self._sampler = sampler

    def step(self, samples: int, device: torch.device) -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        super().step(samples, device)
        before = [self.loop_began, *self.step_ends]
        say(f"step {len(self.step_ends)}: {before[-1] - before[-2]:.3f} s")
        if len(self.step_ends) <= NUM_SHOWN:
            self._sampler.show()


@without_cudnn_attention()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--workload", choices=tuple(run_tasks.PHYSICAL), default="sst2")
    parser.add_argument("--data", type=Path, help="a folder with the folders sst2 and e2e")
    parser.add_argument("--model", type=Path, help="a folder with a BERT and its tokenizer")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--logical", type=int, default=1000)
    parser.add_argument("--limit-seconds", type=float, default=300.0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    device, sampler = torch.device(options.device), Sampler()
    with tempfile.TemporaryDirectory() as folder:
        encoded = Path(folder) / "records.npz"
        if options.workload != "images":
            run_tasks.encode(options.workload, options.data, options.model, encoded, None)
        task = run_tasks.build(options.workload, encoded, options.model, None)
    task.model.to(device).train()
    setting = run_side.Setting(
        task=task, device=device, logical=options.logical, steps=options.steps, compiled=False,
        physical=min(run_tasks.PHYSICAL[options.workload], options.logical),
        pads=device.type == "cuda", limit_seconds=options.limit_seconds,
    )  # fmt: skip
    say(f"model and data are there, and {run_side.count_kernels()} kernels on disk")
    compilations = watch_events()
    sampler.start()
    facts = run_side.run_private(setting, ShownLog(sampler))
    taken = sum(compilations)
    say(f"{len(compilations)} kernels compiled or read in {taken:.1f} s")
    say(f"{run_side.count_kernels()} kernels are on disk")
    say(str(facts["seconds_by_part"]))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
