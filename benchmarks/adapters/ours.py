"""This library: clipped sums by the engine, noise in float32, division, AdamW."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.adapters import CLIP_NORM, NOISE_MULTIPLIER, Setting, Step
from benchmarks.workloads import Batch
from shuffled_dpsgd.clipping import ClippingEngine
from shuffled_dpsgd.training.noise import GaussianNoise
from shuffled_dpsgd.training.randomness import RandomStreams


def private_step(model: nn.Module, setting: Setting, *, variant: str) -> Step:
    """A step of DP-SGD; `variant` is a strategy of the engine, or `compiled`."""
    compiled = variant == "compiled"
    strategy = "bookkeeping" if compiled else variant
    engine = ClippingEngine(model, clip_norm=CLIP_NORM, strategy=strategy)
    optimizer = setting.optimizer(model)
    noise = GaussianNoise(RandomStreams(seed=0))
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    stds = dict.fromkeys(parameters, NOISE_MULTIPLIER * CLIP_NORM)
    losses = setting.workload.losses
    if compiled:
        losses = torch.compile(losses, fullgraph=True)
    steps = 0

    def step(batch: Batch) -> None:
        nonlocal steps
        with engine:
            with setting.autocast():
                per_sample = losses(model, batch)
            engine.backward(per_sample)
        sums = engine.clipped_sum()
        noise.add_(sums, stds, step=steps, divide_by=float(setting.workload.batch_size))
        for name, total in sums.items():
            parameters[name].grad = total
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        engine.reset()
        steps += 1

    return step
