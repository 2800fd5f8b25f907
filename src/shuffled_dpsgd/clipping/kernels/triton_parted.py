"""Weighted sums of linear layers' gradients on Hopper, with loading and multiplying kept apart.

Shapes: L layers of one shape, B samples, T tokens, D input features, P output features. The same
sums as `triton_sums.weighted_outer_sums`: every sample's product in float32, then scaled. The sums
of biases are formed on the way, as a product with ones: reading the gradients once more for them
takes longer.

A block there multiplies, waits for the products, scales them, and multiplies again; meanwhile the
matrix units idle for a third of the time. Here one warp loads, and two groups of four warps each
have half of the block's rows: as neither waits for the other, one multiplies while the other
scales. Written in Gluon, since plain Triton lets no group of warps run ahead.

A few tokens after the last whole chunk, such as 5 of ViT's 197, would make a chunk of zeros. They
have buffers of their own and are multiplied together with the chunk before them.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from shuffled_dpsgd.clipping.kernels.addresses import address_table
from shuffled_dpsgd.clipping.kernels.triton_ring import ELEMENT, after, barriers, held, source_of
from shuffled_dpsgd.clipping.kernels.triton_sums import scratch, segmentation

TAKES_BIASES = True
# Tokens in a load, rows of one group of warps, and registers of a group that multiplies.
CHUNK = gl.constexpr(64)
ROWS = gl.constexpr(64)
MULTIPLYING_REGISTERS = gl.constexpr(232)
LOADING_REGISTERS = gl.constexpr(40)
# Tokens at most that are multiplied together with the chunk before them, and buffers for them: all
# others are filled again before the next but one sample's are.
FEW = gl.constexpr(16)
SIDES = gl.constexpr(2)
# Tokens at most that the matrix units add up before the sum is scaled and rounded as usual: the
# longest that wastes less than a chunk. Longer ones are as fast and less exact (5e-7 at 512).
SEGMENTS = (512, 256, 128, 64)
# Columns of a block, as one wide and one narrow product (none if 0), and loads under way.
COLUMNS, MORE_COLUMNS, STAGES = 128, 64, 5
# Columns of ones that a block's rows are multiplied by for the bias: the fewest that fit a layout.
ONES = gl.constexpr(16)


@gluon.jit
def load(  # type: ignore[no-untyped-def]
    x, g, steps, segments, B, T, D, P, x_batch, x_row, g_batch, g_row, p, d,
    g_ring, x_ring, y_ring, few, ready, empty, CHUNKS: gl.constexpr, SEGMENT: gl.constexpr,
    STAGES: gl.constexpr, WIDE: gl.constexpr, NARROW: gl.constexpr, HAS_FEW: gl.constexpr,
):  # fmt: skip
    """Fill the ring with all chunks of all samples; what lies outside is filled with zeros."""
    g_few, x_few, y_few = few
    gs = source_of(g_ring, g, B, T, P, g_batch, g_row)
    xs = source_of(x_ring, x, B, T, D, x_batch, x_row)
    if NARROW > 0:
        ys = source_of(y_ring, x, B, T, D, x_batch, x_row)
    if HAS_FEW:
        few_gs = source_of(g_few, g, B, T, P, g_batch, g_row)
        few_xs = source_of(x_few, x, B, T, D, x_batch, x_row)
        if NARROW > 0:
            few_ys = source_of(y_few, x, B, T, D, x_batch, x_row)
    stage = 0
    phase = 0
    for step in range(steps):
        b = step // segments
        first = (step % segments) * SEGMENT
        for chunk in gl.static_range(CHUNKS):
            t = first + chunk * CHUNK
            bar = ready.index(stage)
            mbarrier.wait(empty.index(stage), phase ^ 1)
            if HAS_FEW and chunk == CHUNKS - 1:
                mbarrier.expect(bar, (CHUNK + FEW) * (2 * ROWS + WIDE + NARROW) * 2)
            else:
                mbarrier.expect(bar, CHUNK * (2 * ROWS + WIDE + NARROW) * 2)
            tma.async_copy_global_to_shared(gs, [b, t, p], bar, g_ring.index(2 * stage))
            tma.async_copy_global_to_shared(gs, [b, t, p + ROWS], bar, g_ring.index(2 * stage + 1))
            tma.async_copy_global_to_shared(xs, [b, t, d], bar, x_ring.index(stage))
            if NARROW > 0:
                tma.async_copy_global_to_shared(ys, [b, t, d + WIDE], bar, y_ring.index(stage))
            if HAS_FEW and chunk == CHUNKS - 1:
                t += CHUNK
                side = step % SIDES
                tma.async_copy_global_to_shared(few_gs, [b, t, p], bar, g_few.index(2 * side))
                at = g_few.index(2 * side + 1)
                tma.async_copy_global_to_shared(few_gs, [b, t, p + ROWS], bar, at)
                tma.async_copy_global_to_shared(few_xs, [b, t, d], bar, x_few.index(side))
                if NARROW > 0:
                    at = y_few.index(side)
                    tma.async_copy_global_to_shared(few_ys, [b, t, d + WIDE], bar, at)
            stage, phase = after(stage, phase, STAGES)


@gluon.jit
def write(  # type: ignore[no-untyped-def]
    out, total, rows_from, cols_from, P, D, row_stride, col_stride, ADD: gl.constexpr
):
    """Store a block of the (P, D) output, with ADD added to what is there."""
    layout: gl.constexpr = total.type.layout
    rows = rows_from + gl.arange(0, total.shape[0], layout=gl.SliceLayout(1, layout))
    cols = cols_from + gl.arange(0, total.shape[1], layout=gl.SliceLayout(0, layout))
    ptrs = out + rows.to(gl.int64)[:, None] * row_stride + cols.to(gl.int64)[None, :] * col_stride
    inside = (rows < P)[:, None] & (cols < D)[None, :]
    if ADD:
        total += gl.load(ptrs, mask=inside, other=0.0)
    gl.store(ptrs, total, mask=inside)


@gluon.jit
def done(part, part_y, part_1, chunks: gl.constexpr, NARROW: gl.constexpr, BIAS: gl.constexpr):  # type: ignore[no-untyped-def]
    """Wait until all products but those of the last so many chunks, or few tokens, are there."""
    if NARROW > 0:
        if BIAS:
            part, part_y, part_1 = warpgroup_mma_wait(3 * chunks, deps=[part, part_y, part_1])
        else:
            part, part_y = warpgroup_mma_wait(2 * chunks, deps=[part, part_y])
    else:
        if BIAS:
            part, part_1 = warpgroup_mma_wait(2 * chunks, deps=[part, part_1])
        else:
            part = warpgroup_mma_wait(chunks, deps=[part])
    return part, part_y, part_1


@gluon.jit
def multiply(  # type: ignore[no-untyped-def]
    factors_B, out, bias, out_row, out_col, steps, segments, D, P, p, d,
    g_ring, x_ring, y_ring, few, ones, ready, empty,
    GROUP: gl.constexpr, FULL: gl.constexpr, TAIL: gl.constexpr, STAGES: gl.constexpr,
    WIDE: gl.constexpr, NARROW: gl.constexpr, HAS_FEW: gl.constexpr, BIAS: gl.constexpr,
    ADD: gl.constexpr,
):  # fmt: skip
    """One group's rows of the block: the sum over samples of factor times product.

    With BIAS also the rows of the bias, as products with ones.
    """
    wide: gl.constexpr = held(WIDE)
    narrow: gl.constexpr = held(max(NARROW, 8))
    total = gl.zeros((ROWS, WIDE), gl.float32, wide)
    part = gl.zeros((ROWS, WIDE), gl.float32, wide)
    total_y = gl.zeros((ROWS, max(NARROW, 8)), gl.float32, narrow)
    part_y = gl.zeros((ROWS, max(NARROW, 8)), gl.float32, narrow)
    thin: gl.constexpr = held(ONES)
    total_1 = gl.zeros((ROWS, ONES), gl.float32, thin)
    part_1 = gl.zeros((ROWS, ONES), gl.float32, thin)
    g_few, x_few, y_few = few
    CHUNKS: gl.constexpr = FULL + (1 if TAIL > 0 else 0)
    stage = 0
    phase = 0
    for step in range(steps):
        factor = gl.load(factors_B + step // segments)
        before = stage
        for chunk in gl.static_range(CHUNKS):
            mbarrier.wait(ready.index(stage), phase)
            g = g_ring.index(2 * stage + GROUP).reshape([CHUNK, ROWS])
            x = x_ring.index(stage).reshape([CHUNK, WIDE])
            if chunk == FULL:
                g = g.slice(0, TAIL)
                x = x.slice(0, TAIL)
            part = warpgroup_mma(g.permute([1, 0]), x, part, use_acc=chunk > 0, is_async=True)
            if NARROW > 0:
                y = y_ring.index(stage).reshape([CHUNK, NARROW])
                if chunk == FULL:
                    y = y.slice(0, TAIL)
                part_y = warpgroup_mma(
                    g.permute([1, 0]), y, part_y, use_acc=chunk > 0, is_async=True
                )
            if BIAS:
                one = ones.slice(0, TAIL) if chunk == FULL else ones
                part_1 = warpgroup_mma(
                    g.permute([1, 0]), one, part_1, use_acc=chunk > 0, is_async=True
                )
            if HAS_FEW and chunk == CHUNKS - 1:
                side = step % SIDES
                g = g_few.index(2 * side + GROUP).reshape([FEW, ROWS]).permute([1, 0])
                x = x_few.index(side).reshape([FEW, WIDE])
                part = warpgroup_mma(g, x, part, is_async=True)
                if NARROW > 0:
                    y = y_few.index(side).reshape([FEW, NARROW])
                    part_y = warpgroup_mma(g, y, part_y, is_async=True)
                if BIAS:
                    part_1 = warpgroup_mma(g, ones.slice(0, FEW), part_1, is_async=True)
            if chunk > 0:
                # The products of the chunk before are done: its buffers may be filled again.
                if HAS_FEW and chunk == CHUNKS - 1:
                    part, part_y, part_1 = done(part, part_y, part_1, 2, NARROW, BIAS)
                else:
                    part, part_y, part_1 = done(part, part_y, part_1, 1, NARROW, BIAS)
                gl.thread_barrier()
                mbarrier.arrive(empty.index(before), count=1)
            before = stage
            stage, phase = after(stage, phase, STAGES)
        part, part_y, part_1 = done(part, part_y, part_1, 0, NARROW, BIAS)
        gl.thread_barrier()
        mbarrier.arrive(empty.index(before), count=1)
        # A factor of zero must silence infinities and NaNs too.
        if factor != 0.0:
            total += factor * part
            if NARROW > 0:
                total_y += factor * part_y
            if BIAS:
                total_1 += factor * part_1
    write(out, total, p + GROUP * ROWS, d, P, D, out_row, out_col, ADD)
    if NARROW > 0:
        write(out, total_y, p + GROUP * ROWS, d + WIDE, P, D, out_row, out_col, ADD)
    if BIAS:
        # All columns are the same; a matrix of one column takes the first.
        write(bias, total_1, p + GROUP * ROWS, 0, P, 1, 1, 1, ADD)


@gluon.jit
def run_groups(  # type: ignore[no-untyped-def]
    x, g, out, bias, out_row, out_col, factors_B, steps, segments, geometry, rings,
    SEGMENT: gl.constexpr, FULL: gl.constexpr, TAIL: gl.constexpr, STAGES: gl.constexpr,
    WIDE: gl.constexpr, NARROW: gl.constexpr, HAS_FEW: gl.constexpr, BIAS: gl.constexpr,
    ADD: gl.constexpr,
):  # fmt: skip
    """Two groups of warps multiply while one warp loads."""
    B, T, D, P, x_batch, x_row, g_batch, g_row, p, d = geometry
    g_ring, x_ring, y_ring, few, ones, ready, empty = rings
    CHUNKS: gl.constexpr = FULL + (1 if TAIL > 0 else 0)
    gl.warp_specialize(
        [
            (multiply, (factors_B, out, bias, out_row, out_col, steps, segments, D, P, p, d,
                        g_ring, x_ring, y_ring, few, ones, ready, empty, gl.constexpr(0),
                        FULL, TAIL, STAGES, WIDE, NARROW, HAS_FEW, BIAS, ADD)),
            (multiply, (factors_B, out, bias, out_row, out_col, steps, segments, D, P, p, d,
                        g_ring, x_ring, y_ring, few, ones, ready, empty, gl.constexpr(1),
                        FULL, TAIL, STAGES, WIDE, NARROW, HAS_FEW, BIAS, ADD)),
            (load, (x, g, steps, segments, B, T, D, P, x_batch, x_row, g_batch, g_row, p, d,
                    g_ring, x_ring, y_ring, few, ready, empty, CHUNKS, SEGMENT, STAGES, WIDE,
                    NARROW, HAS_FEW)),
        ],
        [4, 1],
        [MULTIPLYING_REGISTERS, LOADING_REGISTERS],
    )  # fmt: skip


@gluon.jit(do_not_specialize=["B"])
def parted_outer_kernel(  # type: ignore[no-untyped-def]
    x_table, g_table, out_table, bias_table, factors_B, B, T, D, P, x_batch, x_row, g_batch, g_row,
    out_row, out_col, segments, SEGMENT: gl.constexpr, FULL: gl.constexpr, TAIL: gl.constexpr,
    STAGES: gl.constexpr, WIDE: gl.constexpr, NARROW: gl.constexpr, HAS_FEW: gl.constexpr,
    BIAS: gl.constexpr, ADD: gl.constexpr, ELEMENT: gl.constexpr,
):  # fmt: skip
    """One block of one layer's sum_b f_b g_b^T x_b.

    With BIAS, blocks of the first columns also form their rows of sum_b f_b sum_t g_bt.
    """
    layer = gl.program_id(1)
    tiles_d = gl.cdiv(D, WIDE + NARROW)
    p = (gl.program_id(0) // tiles_d) * (2 * ROWS)
    d = (gl.program_id(0) % tiles_d) * (WIDE + NARROW)
    x = gl.multiple_of(gl.load(x_table + layer).to(gl.pointer_type(ELEMENT)), 16)
    g = gl.multiple_of(gl.load(g_table + layer).to(gl.pointer_type(ELEMENT)), 16)
    out = gl.multiple_of(gl.load(out_table + layer).to(gl.pointer_type(gl.float32)), 16)
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, CHUNK, ROWS], ELEMENT)
    g_ring = gl.allocate_shared_memory(ELEMENT, [2 * STAGES, 1, CHUNK, ROWS], layout)
    x_ring = gl.allocate_shared_memory(ELEMENT, [STAGES, 1, CHUNK, WIDE], layout)
    if NARROW > 0:
        y_ring = gl.allocate_shared_memory(ELEMENT, [STAGES, 1, CHUNK, NARROW], layout)
    else:
        y_ring = x_ring
    few = (g_ring, x_ring, y_ring)
    if HAS_FEW:
        of_few: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, FEW, ROWS], ELEMENT)
        g_few = gl.allocate_shared_memory(ELEMENT, [2 * SIDES, 1, FEW, ROWS], of_few)
        x_few = gl.allocate_shared_memory(ELEMENT, [SIDES, 1, FEW, WIDE], of_few)
        y_few = x_few
        if NARROW > 0:
            y_few = gl.allocate_shared_memory(ELEMENT, [SIDES, 1, FEW, NARROW], of_few)
        few = (g_few, x_few, y_few)
    ready, empty = barriers(STAGES)
    if BIAS:
        bias = gl.load(bias_table + layer).to(gl.pointer_type(gl.float32))
        block: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [4, 1], [1, 0])
        thin: gl.constexpr = gl.NVMMASharedLayout.get_default_for([CHUNK, ONES], ELEMENT)
        ones = gl.allocate_shared_memory(ELEMENT, [CHUNK, ONES], thin)
        ones.store(gl.full([CHUNK, ONES], 1.0, ELEMENT, block))
    else:
        bias = out
        ones = x_ring
    fence_async_shared()
    steps = B * segments
    geometry = (B, T, D, P, x_batch, x_row, g_batch, g_row, p, d)
    rings = (g_ring, x_ring, y_ring, few, ones, ready, empty)
    # Two kinds of blocks rather than one that asks at every product what to do.
    if BIAS and d == 0:
        run_groups(
            x, g, out, bias, out_row, out_col, factors_B, steps, segments, geometry, rings,
            SEGMENT, FULL, TAIL, STAGES, WIDE, NARROW, HAS_FEW, True, ADD,
        )  # fmt: skip
    else:
        run_groups(
            x, g, out, bias, out_row, out_col, factors_B, steps, segments, geometry, rings,
            SEGMENT, FULL, TAIL, STAGES, WIDE, NARROW, HAS_FEW, False, ADD,
        )  # fmt: skip


def cut_of(tokens: int) -> dict[str, int]:
    """How a sample's tokens are cut into segments of chunks, and whether a few are left over.

    >>> cut_of(197)
    {'segments': 1, 'SEGMENT': 197, 'FULL': 3, 'TAIL': 0, 'HAS_FEW': True}
    >>> cut_of(1000)
    {'segments': 2, 'SEGMENT': 512, 'FULL': 8, 'TAIL': 0, 'HAS_FEW': False}
    """
    cut = segmentation(tokens)
    if cut["segments"] > 1:
        size = next(size for size in SEGMENTS if -tokens % size < CHUNK.value)
        cut = {"segments": -(-tokens // size), "SEGMENT": size, "FULL": size, "TAIL": 0}
    else:
        cut["FULL"] *= cut.pop("CHUNK")
    few = cut["FULL"] > 0 and cut["TAIL"] == FEW.value
    tail = 0 if few else cut["TAIL"]
    return {**cut, "FULL": cut["FULL"] // CHUNK.value, "TAIL": tail, "HAS_FEW": few}


def weighted_outer_sums(
    xs: Sequence[Tensor],
    gs: Sequence[Tensor],
    factors_B: Tensor,
    outs: Sequence[Tensor],
    add: bool = True,
    biases: Sequence[Tensor] = (),
) -> None:
    """Add sum_b f_b g_b^T x_b of L layers of one shape into their (P, D) float32 `outs`.

    The outputs may be transposed views. With (P,) float32 `biases`, sum_b f_b sum_t g_bt is added
    into these. Without `add`, what the outputs hold is overwritten.
    """
    (B, T, D), P, L = xs[0].shape, gs[0].shape[2], len(xs)
    x, g = xs[0], gs[0]
    table = address_table((xs, gs, outs, biases or outs), x.device)
    triton.set_allocator(scratch)
    grid = (triton.cdiv(P, 2 * ROWS.value) * triton.cdiv(D, COLUMNS + MORE_COLUMNS), L)
    parted_outer_kernel[grid](
        table[0], table[1], table[2], table[3], factors_B, B, T, D, P,
        x.stride(0), x.stride(1), g.stride(0), g.stride(1), *outs[0].stride(), **cut_of(T),
        STAGES=STAGES, WIDE=COLUMNS, NARROW=MORE_COLUMNS, BIAS=len(biases) > 0, ADD=add,
        ELEMENT=ELEMENT[x.dtype], num_warps=4,
    )  # fmt: skip
