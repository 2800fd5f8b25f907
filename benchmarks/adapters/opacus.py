"""Opacus 1.6: per-sample gradients by hooks, or ghost clipping with two backward passes.

Stock Hugging Face models do not run under Opacus, so it is helped where it would refuse or crash:
position ids are repeated over the batch, a tied head gets a table of its own, and parameters that
belong to no supported module (ViT's class token and position embeddings) are frozen. All three
make its task easier than the one measured beside it, except that the untied head adds a table.
"""

from __future__ import annotations

import warnings

import torch
from torch import nn

from benchmarks.adapters import CLIP_NORM, NOISE_MULTIPLIER, Setting, Step
from benchmarks.workloads import Batch


def make_acceptable(model: nn.Module) -> None:
    """Untie the head and freeze bare parameters, in place."""
    head = getattr(model, "lm_head", None)
    if head is not None:
        head.weight = nn.Parameter(head.weight.detach().clone())
    embeddings = getattr(getattr(model, "vit", None), "embeddings", None)
    if embeddings is not None:
        embeddings.cls_token.requires_grad_(False)
        embeddings.position_embeddings.requires_grad_(False)


def with_position_ids(batch: Batch) -> Batch:
    """The batch with one row of position ids per sample."""
    if "input_ids" not in batch:
        return batch
    ids = batch["input_ids"]
    positions = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape).contiguous()
    return {**batch, "position_ids": positions}


def opacus_step(model: nn.Module, setting: Setting, *, ghost: bool) -> Step:
    """A step of DP-SGD by Opacus."""
    from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPTensorFastGradientClipping

    # Opacus and the torch it runs on warn on every backward hook; that is not what is measured.
    warnings.filterwarnings("ignore", module="opacus")
    warnings.filterwarnings("ignore", message=".*backward hook.*")
    make_acceptable(model)
    if ghost:
        wrapped = GradSampleModuleFastGradientClipping(
            model, max_grad_norm=CLIP_NORM, use_ghost_clipping=True, strict=False
        )
        optimizer_class = DPOptimizerFastGradientClipping
    else:
        wrapped = GradSampleModule(model, strict=False)
        optimizer_class = DPOptimizer
    optimizer = optimizer_class(
        setting.optimizer(model),
        noise_multiplier=NOISE_MULTIPLIER,
        max_grad_norm=CLIP_NORM,
        expected_batch_size=setting.workload.batch_size,
    )

    def step(batch: Batch) -> None:
        with setting.autocast():
            losses = setting.workload.losses(wrapped, with_position_ids(batch))
        if ghost:
            DPTensorFastGradientClipping(wrapped, optimizer, losses, "mean").backward()
        else:
            losses.mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step
