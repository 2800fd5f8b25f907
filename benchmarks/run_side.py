"""One whole run in a process of its own, as `benchmarks.loop` starts it.

A plain loop is the one a good engineer would write: the same buckets of like length and the same
collate, loaded ahead, and fused AdamW. Rows that only pad a batch are left out of it, except where
a compiler profits from shapes that come again. No side uses cuDNN's attention, which plans anew for
every shape.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.adapters import CLIP_NORM, NOISE_MULTIPLIER
from benchmarks.run_tasks import RunTask, build
from shuffled_dpsgd.core.sampler import PoissonSampler
from shuffled_dpsgd.core.streams import RandomStreams
from shuffled_dpsgd.runtime import backends
from shuffled_dpsgd.runtime.attention import without_cudnn_attention
from shuffled_dpsgd.runtime.clock import Clock
from shuffled_dpsgd.training import make_private
from shuffled_dpsgd.training.background import loaded_ahead
from shuffled_dpsgd.training.data import LogicalBatch, physical_batches, shaped, to_device
from shuffled_dpsgd.training.layout import Layout, Part, lengths_of

SIDES = ("plain", "plain:compiled", "private", "private:compiled")
LEARNING_RATE = 1e-5
Losses = Callable[[nn.Module, Any], Tensor]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What both sides of a comparison share."""

    task: RunTask
    device: torch.device
    logical: int
    physical: int
    steps: int
    pads: bool
    compiled: bool
    # Seconds since the start of the process after which no further step is begun.
    limit_seconds: float = math.inf

    def optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.task.model.parameters(), lr=LEARNING_RATE, fused=True)

    def losses(self) -> Losses:
        bare = torch.compile(self.task.losses) if self.compiled else self.task.losses

        def cast(model: nn.Module, batch: Any) -> Tensor:
            on_gpu = self.device.type == "cuda"
            with torch.autocast(self.device.type, torch.bfloat16, enabled=on_gpu):
                return bare(model, batch)

        return cast


@dataclass(kw_only=True)
class Log:
    """What happened when; times are seconds since the process was started."""

    started: float
    loop_began: float = 0.0
    step_ends: list[float] = field(default_factory=list)
    # What the process has used of its cores by then, which others on the host do not change.
    cpu_seconds: list[float] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    shapes: dict[str, int] = field(default_factory=dict)
    new_shapes: list[int] = field(default_factory=list)
    backwards: int = 0

    def now(self) -> float:
        return time.time() - self.started

    def batch(self, batch: Any) -> None:
        """Take down the shape of a physical batch."""
        self.backwards += 1
        inputs = batch[0]["input_ids"] if isinstance(batch[0], dict) else batch[0]
        shape = "x".join(map(str, inputs.shape))
        if shape not in self.shapes:
            self.new_shapes.append(len(self.step_ends) + 1)
        self.shapes[shape] = self.shapes.get(shape, 0) + 1

    def step(self, samples: int, device: torch.device) -> None:
        """A step is over; the first one also on the device."""
        if not self.step_ends and device.type == "cuda":
            torch.cuda.synchronize(device)
        self.step_ends.append(self.now())
        self.cpu_seconds.append(time.process_time())
        self.samples.append(samples)


class WithoutCopies(Layout):
    """The same batches without the rows that do not count."""

    def parts(self, drawn: Any) -> list[Part]:
        return [replace(p, records=p.records[: p.counted]) for p in super().parts(drawn)]


def run_private(setting: Setting, log: Log) -> dict[str, Any]:
    """`make_private`, every parameter that can move shuffled after every step."""
    task, losses = setting.task, setting.losses()
    private = make_private(
        task.model,
        setting.optimizer(),
        dataset_size=len(task.data),
        expected_batch_size=setting.logical,
        num_steps=setting.steps,
        noise_multiplier=NOISE_MULTIPLIER,
        clip_norm=CLIP_NORM,
        delta=1e-6,
        scope="full",
        physical_batch_size=setting.physical,
    )
    private.clock.start()
    log.loop_began = log.now()
    private.on_update(lambda: log.step(private.last_sample_norms.numel(), setting.device))
    for batch in private.batches(task.data, collate=task.collate, pad_batches=setting.pads):
        log.batch(batch)
        private.backward(losses(private.model, batch))
        if private.step() and log.now() > setting.limit_seconds:
            break
    private.clock.stop()
    return {
        "seconds_by_part": private.clock.seconds(),
        "samples_checked": private.engine.num_checked,
        "backends": backends.report(),
    }


def run_plain(setting: Setting, log: Log) -> dict[str, Any]:
    """The same batches by ordinary training."""
    task, device = setting.task, setting.device
    losses, optimizer, clock = setting.losses(), setting.optimizer(), Clock(setting.device.type)
    sampler = PoissonSampler(
        dataset_size=len(task.data),
        sampling_prob=setting.logical / len(task.data),
        streams=RandomStreams(seed=None),
    )
    clock.start("data")
    log.loop_began = log.now()
    used = 0
    for part in _parts(setting, sampler):
        if part.data is not None:
            batch = to_device(shaped(part.data), device)
            clock.turn_to("forward and backward")
            log.batch(batch)
            own = losses(task.model, batch)[: part.size]
            (own.sum() / setting.logical).backward()
            used += part.size
        if part.completes:
            clock.turn_to("update")
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            log.step(used, device)
            used = 0
            if log.now() > setting.limit_seconds:
                break
        clock.turn_to("data")
    clock.stop()
    return {"seconds_by_part": clock.seconds()}


def _parts(setting: Setting, sampler: PoissonSampler) -> Iterator[Any]:
    kind = Layout if setting.compiled else WithoutCopies
    layout = kind(
        batch_size=setting.physical,
        expected=setting.logical,
        lengths=lengths_of(setting.task.data),
        pads=setting.pads,
        device=setting.device.type,
    )
    logical = (
        LogicalBatch(step=step, indices=tuple(sampler.indices(step).tolist()))
        for step in range(setting.steps)
    )
    on_gpu = setting.device.type == "cuda"
    batches = physical_batches(
        setting.task.data, logical, layout=layout, collate=setting.task.collate,
        pin_memory=on_gpu,
    )  # fmt: skip
    return loaded_ahead(batches) if on_gpu else batches


@without_cudnn_attention()
def main() -> int:
    parser = argparse.ArgumentParser(description="One side of `benchmarks.loop`; not to be called.")
    parser.add_argument("--side", choices=SIDES, required=True)
    parser.add_argument("--workload", required=True)
    parser.add_argument("--encoded", type=Path)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--records", type=int)
    parser.add_argument("--logical", type=int, required=True)
    parser.add_argument("--physical", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--pads", action="store_true")
    parser.add_argument("--started", type=float, required=True)
    parser.add_argument("--limit-seconds", type=float, default=math.inf)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    log, device = Log(started=options.started), torch.device(options.device)
    task = build(options.workload, options.encoded, options.model, options.records)
    task.model.to(device).train()
    name, _, variant = options.side.partition(":")
    setting = Setting(
        task=task, device=device, logical=options.logical, physical=options.physical,
        steps=options.steps, pads=options.pads, compiled=variant == "compiled",
        limit_seconds=options.limit_seconds,
    )  # fmt: skip
    facts = (run_private if name == "private" else run_plain)(setting, log)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        facts["peak_gib"] = torch.cuda.max_memory_allocated(device) / 2**30
    found = {
        "loop_began": log.loop_began,
        "loop_ended": log.now(),
        "step_ends": log.step_ends,
        "cpu_seconds": log.cpu_seconds,
        "samples": log.samples,
        "backwards": log.backwards,
        "shapes": log.shapes,
        "steps_with_new_shapes": log.new_shapes,
        **facts,
    }
    options.output.write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
