"""This library as users meet it: `make_private`, its step and all its checks, shuffle included.

`sharded` is the same with the model under `fully_shard`, in a launch of one rank: what FSDP's hooks
and copies cost, and what of ours is done otherwise.
"""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.adapters import CLIP_NORM, NOISE_MULTIPLIER, Setting, Step
from benchmarks.adapters.sharding import shard
from benchmarks.workloads import Batch
from shuffled_dpsgd.training import make_private

# More than any benchmark takes; a run refuses steps beyond its plan.
NUM_STEPS = 1_000_000


def training_step(model: nn.Module, setting: Setting, *, variant: str) -> Step:
    """A step of a planned run on batches that are fed, every parameter that can move shuffled."""
    if variant == "sharded":
        shard(model, setting.device)
    batch_size = setting.workload.batch_size
    private = make_private(
        model,
        setting.optimizer(model),
        dataset_size=1000 * batch_size,
        expected_batch_size=batch_size,
        num_steps=NUM_STEPS,
        noise_multiplier=NOISE_MULTIPLIER,
        clip_norm=CLIP_NORM,
        delta=1e-6,
        sampling="unaccounted",
        scope="full",
        physical_batch_size=batch_size,
    )
    bare = setting.workload.losses
    losses = torch.compile(bare, fullgraph=True) if variant == "compiled" else bare
    # Entered once and for all, as a loop over its batches would do.
    private.__enter__()

    def step(batch: Batch) -> None:
        # Bare parameters are checked in a first step without the compiler.
        run = losses if private.steps_taken else bare
        with setting.autocast():
            per_sample = run(model, batch)
        private.backward(per_sample)
        private.step()

    return step
