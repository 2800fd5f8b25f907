"""How a step is timed: warm-up, then several blocks of steps, medians with their spread."""

from __future__ import annotations

import gc
import statistics
import time
from dataclasses import asdict, dataclass

import torch

from benchmarks.adapters import Setting, build


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One adapter on one workload. Seconds are per step, one per block; memory is the peak."""

    workload: str
    adapter: str
    batch_size: int
    block_seconds: tuple[float, ...] = ()
    peak_gib: float | None = None
    error: str | None = None

    @property
    def seconds(self) -> float:
        return statistics.median(self.block_seconds)

    def to_json(self) -> dict[str, object]:
        entry = asdict(self)
        if self.error is None:
            entry["samples_per_second"] = self.batch_size / self.seconds
        return entry


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(adapter: str, setting: Setting, *, warmup: int, blocks: int, steps: int) -> Measurement:
    """Time `adapter`; a refusal or crash of a competitor is a result, recorded as its message."""
    device = setting.device
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    torch.manual_seed(0)
    named = {
        "workload": setting.workload.name,
        "adapter": adapter,
        "batch_size": setting.workload.batch_size,
    }
    try:
        with device:
            model = setting.workload.build()
        model.train()
        step = build(adapter, model, setting)
        batch = setting.workload.batch(device)
        for _ in range(warmup):
            step(batch)
        seconds = [time_block(step, batch, device, steps) for _ in range(blocks)]
    except (RuntimeError, ValueError, NotImplementedError, TypeError, ImportError) as error:
        if adapter.startswith(("ours", "plain")):
            raise
        return Measurement(**named, error=f"{type(error).__name__}: {str(error)[:300]}")
    peak = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None
    return Measurement(**named, block_seconds=tuple(seconds), peak_gib=peak)


def time_block(step: object, batch: object, device: torch.device, steps: int) -> float:
    """Mean seconds of `steps` steps between two synchronisations."""
    assert callable(step)
    synchronise(device)
    start = time.perf_counter()
    for _ in range(steps):
        step(batch)
    synchronise(device)
    return (time.perf_counter() - start) / steps
