"""This library: clipped sums by the engine, noise in float32, division, AdamW."""

from __future__ import annotations

from unittest import mock

import torch
from torch import nn

from benchmarks.adapters import CLIP_NORM, NOISE_MULTIPLIER, Setting, Step
from benchmarks.workloads import Batch
from shuffled_dpsgd.clipping import ClippingEngine
from shuffled_dpsgd.clipping.kernels import choices
from shuffled_dpsgd.core.streams import fresh_key
from shuffled_dpsgd.training.device_noise import DeviceNoise


def private_step(model: nn.Module, setting: Setting, *, variant: str) -> Step:
    """A step of DP-SGD; `variant` is a strategy of the engine, `compiled` or `unsplit`.

    With `unsplit`, tensor cores multiply no float32 for norms and sums. A compiled model takes its
    first batch without the compiler, which is when bare parameters are checked.
    """
    compiled, unsplit = variant == "compiled", variant == "unsplit"
    strategy = "bookkeeping" if compiled or unsplit else variant
    engine = ClippingEngine(model, clip_norm=CLIP_NORM, strategy=strategy)
    optimizer = setting.optimizer(model)
    noise = DeviceNoise()
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    stds = dict.fromkeys(parameters, NOISE_MULTIPLIER * CLIP_NORM)
    bare = setting.workload.losses
    losses = torch.compile(bare, fullgraph=True) if compiled else bare
    steps = 0

    def step(batch: Batch) -> None:
        nonlocal steps
        with engine:
            with setting.autocast():
                per_sample = (losses if steps else bare)(model, batch)
            engine.backward(per_sample)
        sums = engine.clipped_sum()
        noise.add_(sums, stds, key=fresh_key(), divide_by=float(setting.workload.batch_size))
        for name, total in sums.items():
            parameters[name].grad = total
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        engine.reset()
        steps += 1

    return without_split(step) if unsplit else step


def without_split(step: Step) -> Step:
    """The same step with products of float32 in plain float32."""

    def unsplit(batch: Batch) -> None:
        with mock.patch.object(choices, "allows_tf32", return_value=False):
            step(batch)

    return unsplit
