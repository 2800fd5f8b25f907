"""Backward of layer norm and RMS norm on a GPU: input and per-sample gradients in one pass.

Shapes: B samples, T tokens, D features, S slices of a sample's tokens. Arithmetic is float32
whatever the operands are. Each program sums its slice's share of the weight and bias gradients in
registers, so the result does not depend on scheduling.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 4
# Enough programs to fill the largest current GPUs twice.
TARGET_PROGRAMS = 264
# Rows wider than this would spill the registers that hold the running sums.
MAX_WIDTH = 8192


@triton.jit
def norm_kernel(  # type: ignore[no-untyped-def]
    x_BTD, g_BTD, weight_D, mean_BT, rstd_BT, grad_x_BTD, sums_BCSD, T, D, slice_tokens,
    SLICES: tl.constexpr, CENTRED: tl.constexpr, AFFINE: tl.constexpr, NEEDS_X: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One slice of one sample; CENTRED is a layer norm (sums of weight and bias), else RMS."""
    sample, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d = tl.arange(0, BLOCK_D)
    weight = tl.full((BLOCK_D,), 1.0, dtype=tl.float32)
    if AFFINE:
        weight = tl.load(weight_D + d, mask=d < D, other=0.0).to(tl.float32)
    weight_sum = tl.zeros((ROWS, BLOCK_D), dtype=tl.float32)
    bias_sum = tl.zeros((ROWS, BLOCK_D), dtype=tl.float32)
    last = tl.minimum((part + 1) * slice_tokens, T)
    for start in range(part * slice_tokens, last, ROWS):
        t = start + tl.arange(0, ROWS)
        row = sample * T + t
        inside = (t < last)[:, None] & (d < D)[None, :]
        at = row[:, None] * D + d[None, :]
        g = tl.load(g_BTD + at, mask=inside, other=0.0).to(tl.float32)
        x = tl.load(x_BTD + at, mask=inside, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_BT + row, mask=t < last, other=0.0)[:, None]
        if CENTRED:
            x -= tl.load(mean_BT + row, mask=t < last, other=0.0)[:, None]
            bias_sum += g
        x_hat = tl.where(inside, x * rstd, 0.0)
        weight_sum += g * x_hat
        if NEEDS_X:
            scaled = g * weight[None, :]
            grad = scaled - x_hat * (tl.sum(scaled * x_hat, 1) / D)[:, None]
            if CENTRED:
                grad -= (tl.sum(scaled, 1) / D)[:, None]
            tl.store(grad_x_BTD + at, grad * rstd, mask=inside)
    channels = 2 if CENTRED else 1
    out = sums_BCSD + (sample * channels * SLICES + part) * D + d
    tl.store(out, tl.sum(weight_sum, 0), mask=d < D)
    if CENTRED:
        tl.store(out + SLICES * D, tl.sum(bias_sum, 0), mask=d < D)


def norm_backward(
    x_BTD: Tensor,
    g_BTD: Tensor,
    weight_D: Tensor | None,
    mean_BT1: Tensor | None,
    rstd_BT1: Tensor,
    needs_grad_x: bool,
) -> tuple[Tensor | None, Tensor]:
    """(grad_x, per-sample sums (B, 2 or 1, D)); contiguous operands, D at most MAX_WIDTH."""
    B, T, D = x_BTD.shape
    slices = max(1, min(triton.cdiv(T, ROWS), triton.cdiv(TARGET_PROGRAMS, B)))
    slice_tokens = triton.cdiv(triton.cdiv(T, slices), ROWS) * ROWS
    slices = triton.cdiv(T, slice_tokens)
    centred = mean_BT1 is not None
    shape = (B, 2 if centred else 1, slices, D)
    sums = torch.empty(shape, dtype=torch.float32, device=x_BTD.device)
    grad_x = torch.empty_like(x_BTD) if needs_grad_x else None
    block_d = triton.next_power_of_2(D)
    norm_kernel[(B, slices)](
        x_BTD, g_BTD, x_BTD if weight_D is None else weight_D, mean_BT1 if centred else rstd_BT1,
        rstd_BT1, sums if grad_x is None else grad_x, sums, T, D, slice_tokens,
        SLICES=slices, CENTRED=centred, AFFINE=weight_D is not None, NEEDS_X=needs_grad_x,
        ROWS=ROWS if block_d <= 2048 else 1, BLOCK_D=block_d, num_warps=8,
    )  # fmt: skip
    return grad_x, sums[:, :, 0] if slices == 1 else sums.sum(2)


def layer_norm_backward(
    x_BTD: Tensor,
    g_BTD: Tensor,
    weight_D: Tensor | None,
    mean_BT1: Tensor,
    rstd_BT1: Tensor,
    needs_grad_x: bool = True,
) -> tuple[Tensor | None, Tensor, Tensor]:
    """`plain.layer_norm_backward` in one launch."""
    grad_x, sums = norm_backward(x_BTD, g_BTD, weight_D, mean_BT1, rstd_BT1, needs_grad_x)
    return grad_x, sums[:, 0], sums[:, 1]


def rms_norm_backward(
    x_BTD: Tensor,
    g_BTD: Tensor,
    weight_D: Tensor | None,
    rstd_BT1: Tensor,
    needs_grad_x: bool = True,
) -> tuple[Tensor | None, Tensor]:
    """`plain.rms_norm_backward` in one launch."""
    grad_x, sums = norm_backward(x_BTD, g_BTD, weight_D, None, rstd_BT1, needs_grad_x)
    return grad_x, sums[:, 0]
