"""Layer norms by the fastest kernels that serve the tensors; shapes as in `plain`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shuffled_dpsgd.clipping.kernels import choices
from shuffled_dpsgd.clipping.kernels.choices import aligned
from shuffled_dpsgd.clipping.kernels.linear_maps import alike
from shuffled_dpsgd.runtime.backends import TAKEN


def fits_triton_norm(x_BTD: Tensor, g_BTD: Tensor) -> bool:
    """Whether the Triton kernel takes these tensors."""
    return (
        choices.may_take(choices.KERNELS, x_BTD.device)
        and x_BTD.numel() > 0
        and torch.float64 not in (x_BTD.dtype, g_BTD.dtype)
        and x_BTD.is_contiguous()
        and g_BTD.is_contiguous()
        and aligned(x_BTD)
        and aligned(g_BTD)
        and x_BTD.shape[-1] <= choices.module("triton.norms").MAX_WIDTH
    )


def norm_sum_runs(
    pairs: Sequence[tuple[Tensor, Tensor]], epsilons: Sequence[float]
) -> list[tuple[list[int], Tensor]]:
    """Indices of pairs of one shape, and their stacked `plain.norm_sums`, (L, B, 2, D)."""
    found: list[tuple[list[int], Tensor]] = []
    for run in alike(pairs, epsilons):
        eps = epsilons[run[0]]
        kernel = "triton.norms" if fits_triton_norm(*pairs[run[0]]) else "plain"
        TAKEN["gradients of norm layers"].add(kernel)
        xs, gs = zip(*(pairs[i] for i in run), strict=True)
        sums_LB2D = choices.module(kernel).norm_sums(xs, gs, eps)
        found.append((run, sums_LB2D))
    return found
