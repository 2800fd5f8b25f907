"""One training step per competitor, behind one signature.

An adapter takes a fresh model and gives back a function that performs one whole step: forward,
losses, backward, whatever makes it private, and AdamW. Only that function is timed.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import nn

from benchmarks.workloads import Batch, Workload

Step = Callable[[Batch], None]
CLIP_NORM = 1.0
NOISE_MULTIPLIER = 1.0


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What every adapter of one comparison shares."""

    workload: Workload
    device: torch.device
    bfloat16: bool

    def autocast(self) -> AbstractContextManager[object]:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.bfloat16)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trainable, lr=1e-5, fused=True)


def build(name: str, model: nn.Module, setting: Setting) -> Step:
    """The step of the adapter called `name`."""
    family, _, variant = name.partition(":")
    if family == "plain":
        from benchmarks.adapters.plain import plain_step

        return plain_step(model, setting, variant=variant)
    if family == "ours":
        from benchmarks.adapters.ours import private_step

        return private_step(model, setting, variant=variant or "bookkeeping")
    if family == "training":
        from benchmarks.adapters.training import training_step

        return training_step(model, setting, variant=variant)
    if family == "opacus":
        from benchmarks.adapters.opacus import opacus_step

        return opacus_step(model, setting, ghost=variant == "ghost")
    raise SystemExit(f"adapter {name!r}: expected one of {', '.join(ADAPTERS)}")


ADAPTERS = (
    "plain",
    "plain:compiled",
    "plain:sharded",
    "ours",
    "ours:compiled",
    "ours:ghost",
    "ours:mixed",
    "ours:instantiate",
    "ours:unsplit",
    "training",
    "training:compiled",
    "training:sharded",
    "opacus:hooks",
    "opacus:ghost",
)
