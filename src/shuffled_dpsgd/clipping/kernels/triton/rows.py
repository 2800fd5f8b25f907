"""Weighted sums over samples on a GPU: of biases' gradients and of stored per-sample gradients.

Shapes: L layers of one shape, B samples, S shares of the samples, T tokens, P output features, N
numbers of a stored gradient. Sums are float32. Every number is read once and little is computed, so
all that counts is that enough programs read at the same time. For biases the samples are divided
into shares, and a second small kernel adds the shares up in a fixed order. Stored gradients are
float32, and large enough to be divided by their numbers instead.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from shuffled_dpsgd.clipping.kernels.triton.addresses import address_table
from shuffled_dpsgd.clipping.kernels.triton.linear import ELEMENT, tile_at
from shuffled_dpsgd.clipping.kernels.triton.sums import readable_width

# Tokens and features a program reads at a time, and its warps: four 16-byte loads per thread.
BLOCK_T, BLOCK_P, NUM_WARPS = 32, 128, 4
# Enough programs to keep the memory of the largest current GPUs busy.
TARGET_PROGRAMS = 4096
# Samples and numbers of stored gradients a program reads at a time: four 16-byte loads a thread.
STORED_B, STORED_N = 4, 512


@triton.jit(do_not_specialize=["B", "T", "share"])
def row_sum_kernel(  # type: ignore[no-untyped-def]
    g_table, out_LSP, factors_B, B, T, P, readable, g_batch, g_row, share,
    BLOCK_T: tl.constexpr, BLOCK_P: tl.constexpr, ELEMENT: tl.constexpr,
):  # fmt: skip
    """One block of one layer's sum_b f_b sum_t g_bt over one share of the samples.

    Features from P up to `readable` are read, for wide loads, and not stored.
    """
    part, layer = tl.program_id(1), tl.program_id(2)
    p = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    g = tile_at(g_table, layer, ELEMENT)
    rows = tl.arange(0, BLOCK_T)
    total = tl.zeros((BLOCK_T, BLOCK_P), dtype=tl.float32)
    first_sample = part.to(tl.int64) * share
    for step in range(tl.minimum(share, B - part * share)):
        sample = first_sample + step
        factor = tl.load(factors_B + sample)
        g_b = g + sample * g_batch + p[None, :]
        of_sample = tl.zeros((BLOCK_T, BLOCK_P), dtype=tl.float32)
        for first in range(0, T, BLOCK_T):
            t = first + rows
            inside = (t < T)[:, None] & (p < readable)[None, :]
            tile = tl.load(g_b + t[:, None] * g_row, mask=inside, other=0.0)
            of_sample += tile.to(tl.float32)
        # A factor of zero must silence infinities and NaNs too.
        total += tl.where(factor == 0.0, 0.0, factor * of_sample)
    out = out_LSP + (layer * tl.num_programs(1) + part).to(tl.int64) * P + p
    tl.store(out, tl.sum(total, 0), mask=p < P)


@triton.jit(do_not_specialize=["S"])
def add_shares_kernel(  # type: ignore[no-untyped-def]
    parts_LSP, out_table, S, P, ADD: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """One block of one layer's shares, added up in order; with ADD, to what the output holds."""
    layer = tl.program_id(1)
    p = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    parts = parts_LSP + layer.to(tl.int64) * S * P + p
    total = tl.zeros((BLOCK_P,), dtype=tl.float32)
    for part in range(S):
        total += tl.load(parts + part * P, mask=p < P, other=0.0)
    out = tl.load(out_table + layer).to(tl.pointer_type(tl.float32)) + p
    if ADD:
        total += tl.load(out, mask=p < P, other=0.0)
    tl.store(out, total, mask=p < P)


def weighted_row_sums(
    gs: Sequence[Tensor], factors_B: Tensor, outs: Sequence[Tensor], add: bool = True
) -> None:
    """Add sum_b f_b sum_t g_bt of L layers of one shape into their (P,) float32 `outs`.

    Without `add`, what the outputs hold is overwritten.
    """
    (B, T, P), g, L = gs[0].shape, gs[0], len(gs)
    table = address_table((gs, outs), g.device)
    blocks = triton.cdiv(P, BLOCK_P)
    share = triton.cdiv(B, min(B, triton.cdiv(TARGET_PROGRAMS, blocks * L)))
    shares = triton.cdiv(B, share)
    parts = torch.empty(L, shares, P, dtype=torch.float32, device=g.device)
    row_sum_kernel[(blocks, shares, L)](
        table[0], parts, factors_B, B, T, P, readable_width(g), g.stride(0), g.stride(1), share,
        BLOCK_T=BLOCK_T, BLOCK_P=BLOCK_P, ELEMENT=ELEMENT[g.dtype], num_warps=NUM_WARPS,
    )  # fmt: skip
    add_shares_kernel[(blocks, L)](
        parts, table[1], shares, P, ADD=add, BLOCK_P=BLOCK_P, num_warps=4
    )


@triton.jit(do_not_specialize=["B"])
def stored_sum_kernel(  # type: ignore[no-untyped-def]
    grads_BN, factors_B, out_N, B, N,
    ADD: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One block of sum_b f_b grads_b."""
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_B, BLOCK_N), dtype=tl.float32)
    for first in range(0, B, BLOCK_B):
        b = first + tl.arange(0, BLOCK_B)
        factor = tl.load(factors_B + b, mask=b < B, other=0.0)[:, None]
        # A factor of zero must silence infinities and NaNs too.
        inside = (factor != 0.0) & (n < N)[None, :]
        rows = tl.load(grads_BN + b.to(tl.int64)[:, None] * N + n[None, :], mask=inside, other=0.0)
        total += factor * rows
    out = tl.sum(total, 0)
    if ADD:
        out += tl.load(out_N + n, mask=n < N, other=0.0)
    tl.store(out_N + n, out, mask=n < N)


def weighted_stored_sum(
    grads_BN: Tensor, factors_B: Tensor, out_N: Tensor, add: bool = True
) -> None:
    """Add sum_b f_b grads_b into the float32 `out_N`; without `add`, overwrite what it holds."""
    B, N = grads_BN.shape
    stored_sum_kernel[(triton.cdiv(N, STORED_N),)](
        grads_BN, factors_B, out_N, B, N,
        ADD=add, BLOCK_B=STORED_B, BLOCK_N=STORED_N, num_warps=4,
    )  # fmt: skip
