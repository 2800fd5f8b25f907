"""Per-sample parameter gradients of layer norms on a GPU, many layers at once.

Shapes: L layers, B samples, T tokens, D features, S slices of a sample's tokens. Arithmetic is
float32 whatever the operands are. Each program sums its slice's share of the weight and bias
gradients in registers, so the result does not depend on scheduling. Mean and deviation are found
again from the input, which has to be read in any case.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from shuffled_dpsgd.clipping.kernels.triton.addresses import address_table

ROWS = 4
# Enough programs to fill the largest current GPUs twice.
TARGET_PROGRAMS = 264
# Rows wider than this would spill the registers that hold the running sums.
MAX_WIDTH = 8192
ELEMENT = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}


@triton.jit(do_not_specialize=["B", "T", "slice_tokens", "slices"])
def norm_kernel(  # type: ignore[no-untyped-def]
    x_table, g_table, sums_LBCSD, B, T, D, eps, slice_tokens, slices,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr, X: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    """One slice of one sample of one layer."""
    part, sample, layer = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    x_base = tl.multiple_of(tl.load(x_table + layer).to(tl.pointer_type(X)), 16)
    g_base = tl.multiple_of(tl.load(g_table + layer).to(tl.pointer_type(G)), 16)
    d = tl.arange(0, BLOCK_D)
    weight_sum = tl.zeros((ROWS, BLOCK_D), dtype=tl.float32)
    bias_sum = tl.zeros((ROWS, BLOCK_D), dtype=tl.float32)
    last = tl.minimum((part + 1) * slice_tokens, T)
    for start in range(part * slice_tokens, last, ROWS):
        t = start + tl.arange(0, ROWS)
        inside = (t < last)[:, None] & (d < D)[None, :]
        at = (sample * T + t)[:, None] * D + d[None, :]
        g = tl.load(g_base + at, mask=inside, other=0.0).to(tl.float32)
        x = tl.load(x_base + at, mask=inside, other=0.0).to(tl.float32)
        x = tl.where(inside, x - (tl.sum(x, 1) / D)[:, None], 0.0)
        bias_sum += g
        weight_sum += g * x * tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
    out = sums_LBCSD + ((layer * B + sample) * 2 * slices + part) * D + d
    tl.store(out, tl.sum(weight_sum, 0), mask=d < D)
    tl.store(out + slices * D, tl.sum(bias_sum, 0), mask=d < D)


def norm_sums(xs: Sequence[Tensor], gs: Sequence[Tensor], eps: float) -> Tensor:
    """Per-sample gradients of weight and bias: (L, B, 2, D)."""
    (B, T, D), L, device = xs[0].shape, len(xs), xs[0].device
    slices = max(1, min(triton.cdiv(T, ROWS), triton.cdiv(TARGET_PROGRAMS, B * L)))
    slice_tokens = triton.cdiv(triton.cdiv(T, slices), ROWS) * ROWS
    slices = triton.cdiv(T, slice_tokens)
    sums = torch.empty(L, B, 2, slices, D, dtype=torch.float32, device=device)
    table = address_table((xs, gs), device)
    block_d = triton.next_power_of_2(D)
    norm_kernel[(slices, B, L)](
        *table, sums, B, T, D, eps, slice_tokens, slices,
        ROWS=ROWS if block_d <= 2048 else 1, BLOCK_D=block_d,
        X=ELEMENT[xs[0].dtype], G=ELEMENT[gs[0].dtype], num_warps=8,
    )  # fmt: skip
    return sums[:, :, :, 0] if slices == 1 else sums.sum(3)
