"""Products g^T x of linear layers on Hopper, sample by sample, with loading and multiplying apart.

Shapes: B samples, T tokens, D input features, P output features. One warp loads, and two groups of
four warps each have half of a block's rows: as neither waits for the other, one multiplies while
the other does something with its products. `triton_parted` adds them up, `triton_squares` squares
them; both get the same products, bit for bit. Written in Gluon, since plain Triton lets no group of
warps run ahead.

A few tokens after the last whole chunk, such as 5 of ViT's 197, would make a chunk of zeros. They
have buffers of their own and are multiplied together with the chunk before them, if a sample has
enough chunks for these buffers to be free again in time.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from shuffled_dpsgd.clipping.kernels.triton_ring import after, barriers, held, source_of
from shuffled_dpsgd.clipping.kernels.triton_sums import segmentation

# Tokens in a load, rows of one group of warps, and registers of a group that multiplies.
CHUNK = gl.constexpr(64)
ROWS = gl.constexpr(64)
MULTIPLYING_REGISTERS = gl.constexpr(232)
LOADING_REGISTERS = gl.constexpr(40)
# Tokens at most that are multiplied together with the chunk before them, and buffers for them.
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
def block_at(number, D, WIDE: gl.constexpr, NARROW: gl.constexpr):  # type: ignore[no-untyped-def]
    """The first row and column of a block of the (P, D) product, by its number."""
    blocks_d = gl.cdiv(D, WIDE + NARROW)
    return (number // blocks_d) * (2 * ROWS), (number % blocks_d) * (WIDE + NARROW)


@gluon.jit
def tensor_of(table, layer, ELEMENT: gl.constexpr):  # type: ignore[no-untyped-def]
    """Where a layer's tensor begins, from a table of addresses."""
    return gl.multiple_of(gl.load(table + layer).to(gl.pointer_type(ELEMENT)), 16)


@gluon.jit
def buffers(  # type: ignore[no-untyped-def]
    STAGES: gl.constexpr, WIDE: gl.constexpr, NARROW: gl.constexpr, HAS_FEW: gl.constexpr,
    BIAS: gl.constexpr, ELEMENT: gl.constexpr,
):  # fmt: skip
    """The rings of g, x and the narrow part of x; those for a few tokens; ones; the barriers."""
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
        block: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [4, 1], [1, 0])
        thin: gl.constexpr = gl.NVMMASharedLayout.get_default_for([CHUNK, ONES], ELEMENT)
        ones = gl.allocate_shared_memory(ELEMENT, [CHUNK, ONES], thin)
        ones.store(gl.full([CHUNK, ONES], 1.0, ELEMENT, block))
    else:
        ones = x_ring
    fence_async_shared()
    return g_ring, x_ring, y_ring, few, ones, ready, empty


@gluon.jit
def load(  # type: ignore[no-untyped-def]
    source, geometry, rings, SEGMENT: gl.constexpr, FULL: gl.constexpr, TAIL: gl.constexpr,
    STAGES: gl.constexpr, WIDE: gl.constexpr, NARROW: gl.constexpr, HAS_FEW: gl.constexpr,
):  # fmt: skip
    """Fill the ring with all chunks of all samples; what lies outside is filled with zeros."""
    CHUNKS: gl.constexpr = FULL + (1 if TAIL > 0 else 0)
    x, g, T, x_batch, x_row, g_batch, g_row = source
    B, segments, D, P, p, d = geometry
    g_ring, x_ring, y_ring, few, _ones, ready, empty = rings
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
    for step in range(B * segments):
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
def segment(  # type: ignore[no-untyped-def]
    part, part_y, part_1, rings, step, stage, phase,
    GROUP: gl.constexpr, FULL: gl.constexpr, TAIL: gl.constexpr, STAGES: gl.constexpr,
    WIDE: gl.constexpr, NARROW: gl.constexpr, HAS_FEW: gl.constexpr, BIAS: gl.constexpr,
):  # fmt: skip
    """One group's rows of the products of one segment of one sample; with BIAS those with ones."""
    g_ring, x_ring, y_ring, few, ones, ready, empty = rings
    g_few, x_few, y_few = few
    CHUNKS: gl.constexpr = FULL + (1 if TAIL > 0 else 0)
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
            part_y = warpgroup_mma(g.permute([1, 0]), y, part_y, use_acc=chunk > 0, is_async=True)
        if BIAS:
            one = ones.slice(0, TAIL) if chunk == FULL else ones
            part_1 = warpgroup_mma(g.permute([1, 0]), one, part_1, use_acc=chunk > 0, is_async=True)
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
    return part, part_y, part_1, stage, phase


@gluon.jit
def zeros(WIDE: gl.constexpr, NARROW: gl.constexpr):  # type: ignore[no-untyped-def]
    """One group's rows of a block, wide and narrow, and of products with ones."""
    wide = gl.zeros((ROWS, WIDE), gl.float32, held(WIDE))
    narrow = gl.zeros((ROWS, max(NARROW, 8)), gl.float32, held(max(NARROW, 8)))
    return wide, narrow, gl.zeros((ROWS, ONES), gl.float32, held(ONES))


def cut_of(tokens: int) -> dict[str, int]:
    """How a sample's tokens are cut into segments of chunks, and whether a few are left over.

    >>> cut_of(197)
    {'segments': 1, 'SEGMENT': 197, 'FULL': 3, 'TAIL': 0, 'HAS_FEW': True}
    >>> cut_of(130)
    {'segments': 1, 'SEGMENT': 130, 'FULL': 2, 'TAIL': 16, 'HAS_FEW': False}
    >>> cut_of(1000)
    {'segments': 2, 'SEGMENT': 512, 'FULL': 8, 'TAIL': 0, 'HAS_FEW': False}
    """
    cut = segmentation(tokens)
    if cut["segments"] > 1:
        size = next(size for size in SEGMENTS if -tokens % size < CHUNK.value)
        cut = {"segments": -(-tokens // size), "SEGMENT": size, "FULL": size, "TAIL": 0}
    else:
        cut["FULL"] *= cut.pop("CHUNK")
    full = cut["FULL"] // CHUNK.value
    # A sample's few are loaded once the chunk STAGES before them is done with; by then the few
    # that lie in the same buffer, SIDES samples earlier, must be too.
    few = cut["TAIL"] == FEW.value and full * SIDES.value >= STAGES
    return {**cut, "FULL": full, "TAIL": 0 if few else cut["TAIL"], "HAS_FEW": few}


def shape_of(tokens: int) -> dict[str, int]:
    """How the kernels multiply: the columns of a block, loads under way, and `cut_of`."""
    return {"STAGES": STAGES, "WIDE": COLUMNS, "NARROW": MORE_COLUMNS, **cut_of(tokens)}


def blocks(rows: int, columns: int) -> int:
    """Blocks that make up so large a product."""
    return -(-rows // (2 * ROWS.value)) * -(-columns // (COLUMNS + MORE_COLUMNS))
