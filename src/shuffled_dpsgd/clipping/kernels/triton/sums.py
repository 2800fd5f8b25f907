"""Weighted sums of linear layers' gradients on a GPU, multiplied out tile by tile.

Shapes: L layers of one shape, B samples, T tokens, D input features, P output features. Operands
as in `linear`; every product is accumulated in float32.

Why the weighted sum is a kernel of its own: scaling bfloat16 rows by a clip factor would round
them again, and a sample could then contribute a part in 256 more than the clip norm. Here each
sample's product is formed in float32 and scaled in float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from shuffled_dpsgd.clipping.kernels.triton.addresses import address_table
from shuffled_dpsgd.clipping.kernels.triton.device_limits import stages_that_fit
from shuffled_dpsgd.clipping.kernels.triton.linear import ELEMENT, add_product, tile_at

BLOCK = 128
# Tokens of a sample that fit into shared memory whole, twice: 2 x 2 x 128 features of 2 bytes each.
MAX_SHORT = 208
# Tokens a weighted sum takes from one sample at a time when the whole sample is too long.
LONG_SEGMENT = 128


@triton.jit
def outer_chunk(  # type: ignore[no-untyped-def]
    g, x, g_row, x_row, t, p, d, T, P, D, acc,
    EVEN_T: tl.constexpr, EVEN_P: tl.constexpr, EVEN_D: tl.constexpr,
):  # fmt: skip
    """acc + g_t^T x_t over the tokens `t`; EVEN says that an axis needs no mask when reading.

    Features past the end only reach rows and columns of the output that are not stored.
    """
    g_ptrs = g + t[:, None] * g_row + p[None, :]
    x_ptrs = x + t[:, None] * x_row + d[None, :]
    if EVEN_T and EVEN_P:
        g_tile = tl.load(g_ptrs)
    else:
        g_tile = tl.load(g_ptrs, mask=(t < T)[:, None] & (p < P)[None, :], other=0.0)
    if EVEN_T and EVEN_D:
        x_tile = tl.load(x_ptrs)
    else:
        x_tile = tl.load(x_ptrs, mask=(t < T)[:, None] & (d < D)[None, :], other=0.0)
    return add_product(tl.trans(g_tile), x_tile, acc)


@triton.jit(do_not_specialize=["B"])
def outer_kernel(  # type: ignore[no-untyped-def]
    x_table, g_table, out_table, factors_B, B, T, D, P, x_batch, x_row, g_batch, g_row,
    segments, SEGMENT: tl.constexpr, FULL: tl.constexpr, CHUNK: tl.constexpr, TAIL: tl.constexpr,
    EVEN_T: tl.constexpr, EVEN_P: tl.constexpr, EVEN_D: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr, ADD: tl.constexpr, ELEMENT: tl.constexpr,
):  # fmt: skip
    """One tile of one layer's sum_b f_b g_b^T x_b, with ADD added to what the output holds.

    A sample's tokens come in `segments` segments of FULL chunks of CHUNK tokens and one of TAIL.
    """
    layer = tl.program_id(1)
    tiles_d = tl.cdiv(D, BLOCK_D)
    p = (tl.program_id(0) // tiles_d) * BLOCK_P + tl.arange(0, BLOCK_P)
    d = (tl.program_id(0) % tiles_d) * BLOCK_D + tl.arange(0, BLOCK_D)
    x = tile_at(x_table, layer, ELEMENT)
    g = tile_at(g_table, layer, ELEMENT)
    total = tl.zeros((BLOCK_P, BLOCK_D), dtype=tl.float32)
    for step in range(B * segments):
        sample = (step // segments).to(tl.int64)
        first = (step % segments) * SEGMENT
        factor = tl.load(factors_B + sample)
        x_b = x + sample * x_batch
        g_b = g + sample * g_batch
        part = tl.zeros((BLOCK_P, BLOCK_D), dtype=tl.float32)
        for chunk in tl.static_range(FULL):
            t = first + chunk * CHUNK + tl.arange(0, CHUNK)
            part = outer_chunk(
                g_b, x_b, g_row, x_row, t, p, d, T, P, D, part, EVEN_T, EVEN_P, EVEN_D
            )
        if TAIL > 0:
            t = first + FULL * CHUNK + tl.arange(0, TAIL)
            part = outer_chunk(
                g_b, x_b, g_row, x_row, t, p, d, T, P, D, part, False, EVEN_P, EVEN_D
            )
        # A factor of zero must silence infinities and NaNs too.
        total += tl.where(factor == 0.0, 0.0, factor * part)
    out = tl.multiple_of(tl.load(out_table + layer).to(tl.pointer_type(tl.float32)), 16)
    out_ptrs = out + p.to(tl.int64)[:, None] * D + d[None, :]
    inside = (p < P)[:, None] & (d < D)[None, :]
    if ADD:
        total += tl.load(out_ptrs, mask=inside, other=0.0)
    tl.store(out_ptrs, total, mask=inside)


def may_read_past(tensor: Tensor, width: int) -> bool:
    """Whether every row can be read `width` elements wide without leaving the tensor's memory."""
    B, T, _ = tensor.shape
    last = tensor.storage_offset() + (B - 1) * tensor.stride(0) + (T - 1) * tensor.stride(1) + width
    return last * tensor.element_size() <= tensor.untyped_storage().nbytes()


def readable_width(tensor: Tensor) -> int:
    """The width, rounded up to 16 where rows allow: a mask keeps loads from being wide."""
    width = tensor.shape[2]
    rounded = -(-width // 16) * 16
    return rounded if rounded <= tensor.stride(1) and may_read_past(tensor, rounded) else width


def segmentation(tokens: int) -> dict[str, int]:
    """How a sample's tokens are cut: few wasted rows for short samples, long segments else."""
    chunk = 128 if tokens == 128 else 64
    full, rest = divmod(tokens, chunk)
    tail = max(16, triton.next_power_of_2(rest)) if rest else 0
    if full * chunk + tail <= MAX_SHORT:
        return {"segments": 1, "SEGMENT": tokens, "FULL": full, "CHUNK": chunk, "TAIL": tail}
    chunk = LONG_SEGMENT if -tokens % LONG_SEGMENT < 64 else 64
    return {"segments": -(-tokens // chunk), "SEGMENT": chunk, "FULL": 1, "CHUNK": chunk,
            "TAIL": 0}  # fmt: skip


def weighted_outer_sums(
    xs: Sequence[Tensor],
    gs: Sequence[Tensor],
    factors_B: Tensor,
    outs: Sequence[Tensor],
    add: bool = True,
) -> None:
    """Add sum_b f_b g_b^T x_b of L layers of one shape into their `outs`, or overwrite these."""
    (B, T, D), P, L = xs[0].shape, gs[0].shape[2], len(xs)
    x, g = xs[0], gs[0]
    table = address_table((xs, gs, outs), x.device)
    cut = segmentation(T)
    grid = (triton.cdiv(P, BLOCK) * triton.cdiv(D, BLOCK), L)
    strides = (x.stride(0), x.stride(1), g.stride(0), g.stride(1))
    tokens = cut["FULL"] * cut["CHUNK"] + cut["TAIL"]
    stage_bytes = tokens * 2 * BLOCK * x.element_size()
    stages = stages_that_fit(3 if tokens <= 128 else 2, stage_bytes, x.device)
    outer_kernel[grid](
        table[0], table[1], table[2], factors_B, B, T, D, P, *strides, **cut,
        EVEN_T=T % (cut["CHUNK"] * cut["segments"]) == 0 or cut["segments"] == 1,
        EVEN_P=may_read_past(g, triton.cdiv(P, BLOCK) * BLOCK),
        EVEN_D=may_read_past(x, triton.cdiv(D, BLOCK) * BLOCK),
        BLOCK_P=BLOCK, BLOCK_D=BLOCK, ADD=add, ELEMENT=ELEMENT[x.dtype],
        num_warps=8, num_stages=stages,
    )  # fmt: skip
