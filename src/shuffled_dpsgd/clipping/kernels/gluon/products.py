"""Products g^T x of linear layers on Hopper, sample by sample, with loading and multiplying apart.

Shapes: B samples, T tokens, D input features, P output features. One warp fills the buffers of a
ring. GROUPS groups of four warps multiply what lies in them, each its ROWS of a block's rows, and
no group waits for another: one multiplies while another works on its products. A buffer has two
barriers: `ready` when it is filled, `empty` when all groups are done with it. This is Gluon because
in plain Triton no group of warps can run ahead of the others.

The few tokens after the last whole chunk, such as 5 of ViT's 197, would need a chunk that is mostly
zeros. They have small buffers of their own and are multiplied together with the chunk before them,
if a sample has enough chunks for these buffers to be free again in time.
"""

from __future__ import annotations

from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from shuffled_dpsgd.clipping.kernels.triton.sums import segmentation

ELEMENT = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
# Groups of warps, rows of each, columns of a block, and loads under way: as large a block as leaves
# registers for a product and a sum of every number of it.
GROUPS, ROWS, COLUMNS, STAGES = (gl.constexpr(n) for n in (3, 64, 128, 5))
# Tokens in a load, tokens at most that are multiplied together with the chunk before them, and
# buffers for them.
CHUNK, FEW, SIDES = (gl.constexpr(n) for n in (64, 16, 2))
# Tokens that the matrix units add up before the sum is scaled and rounded as usual. The longest is
# taken that wastes less than a chunk. Longer sums are less exact (5e-7 at 512).
SEGMENTS = (512, 256, 128, 64)
# Columns of ones that a block's rows are multiplied by for the bias: the fewest that fit a layout.
ONES = gl.constexpr(16)
# Names of other releases of Triton, which may still be there only to say that they are gone. All
# threads of a group of warps wait for each other: `thread_barrier` in Triton 3.6. The copy engine
# begins to fill a buffer: `async_copy_global_to_shared` in Triton 3.6 and 3.7.
group_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
begin_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared


@gluon.jit
def after(stage, phase):  # type: ignore[no-untyped-def]
    """The place in the ring of buffers after this one, and its phase."""
    last = stage == STAGES - 1
    return gl.where(last, 0, stage + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def tensor_of(table, layer, ELEMENT: gl.constexpr):  # type: ignore[no-untyped-def]
    """Where a layer's tensor begins, from a table of addresses."""
    return gl.multiple_of(gl.load(table + layer).to(gl.pointer_type(ELEMENT)), 16)


@gluon.jit
def source_of(ring, tensor, B, T, W, batch, row):  # type: ignore[no-untyped-def]
    """A (B, T, W) tensor of these strides, to be loaded in boxes of one buffer of the ring."""
    box: gl.constexpr = [1, ring.shape[2], ring.shape[3]]
    return tma.make_tensor_descriptor(tensor, [B, T, W], [batch, row, 1], box, ring.type.layout)


@gluon.constexpr_function
def held(N):  # type: ignore[no-untyped-def]
    """How a group of warps holds 64 rows of N products."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])


@gluon.jit
def buffers(  # type: ignore[no-untyped-def]
    HAS_FEW: gl.constexpr, BIAS: gl.constexpr, ELEMENT: gl.constexpr
):
    """The rings of g and x, those for a few tokens, ones, and the barriers."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, CHUNK, ROWS], ELEMENT)
    g_ring = gl.allocate_shared_memory(ELEMENT, [GROUPS * STAGES, 1, CHUNK, ROWS], layout)
    x_ring = gl.allocate_shared_memory(ELEMENT, [STAGES, 1, CHUNK, COLUMNS], layout)
    few = (g_ring, x_ring)
    if HAS_FEW:
        of_few: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, FEW, ROWS], ELEMENT)
        g_few = gl.allocate_shared_memory(ELEMENT, [GROUPS * SIDES, 1, FEW, ROWS], of_few)
        x_few = gl.allocate_shared_memory(ELEMENT, [SIDES, 1, FEW, COLUMNS], of_few)
        few = (g_few, x_few)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=GROUPS)
    if BIAS:
        block: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [4, 1], [1, 0])
        thin: gl.constexpr = gl.NVMMASharedLayout.get_default_for([CHUNK, ONES], ELEMENT)
        ones = gl.allocate_shared_memory(ELEMENT, [CHUNK, ONES], thin)
        ones.store(gl.full([CHUNK, ONES], 1.0, ELEMENT, block))
    else:
        ones = x_ring
    fence_async_shared()
    return g_ring, x_ring, few, ones, ready, empty


@gluon.jit
def load_chunk(gs, xs, g_buffers, x_buffers, bar, b, t, p, d, at):  # type: ignore[no-untyped-def]
    """Begin to load some tokens of a sample into the buffers of every group and of all."""
    for group in gl.static_range(GROUPS):
        buffer = g_buffers.index(GROUPS * at + group)
        begin_load(gs, [b, t, p + group * ROWS], bar, buffer)
    begin_load(xs, [b, t, d], bar, x_buffers.index(at))


@gluon.jit
def load(  # type: ignore[no-untyped-def]
    source, geometry, rings, SEGMENT: gl.constexpr, FULL: gl.constexpr, TAIL: gl.constexpr,
    HAS_FEW: gl.constexpr,
):  # fmt: skip
    """Fill the ring with all chunks of all samples; what lies outside is filled with zeros."""
    CHUNKS: gl.constexpr = FULL + (1 if TAIL > 0 else 0)
    x, g, T, x_batch, x_row, g_batch, g_row = source
    B, segments, D, P, p, d = geometry
    g_ring, x_ring, few, _ones, ready, empty = rings
    g_few, x_few = few
    gs = source_of(g_ring, g, B, T, P, g_batch, g_row)
    xs = source_of(x_ring, x, B, T, D, x_batch, x_row)
    if HAS_FEW:
        few_gs = source_of(g_few, g, B, T, P, g_batch, g_row)
        few_xs = source_of(x_few, x, B, T, D, x_batch, x_row)
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
                mbarrier.expect(bar, (CHUNK + FEW) * (GROUPS * ROWS + COLUMNS) * 2)
                load_chunk(gs, xs, g_ring, x_ring, bar, b, t, p, d, stage)
                load_chunk(few_gs, few_xs, g_few, x_few, bar, b, t + CHUNK, p, d, step % SIDES)
            else:
                mbarrier.expect(bar, CHUNK * (GROUPS * ROWS + COLUMNS) * 2)
                load_chunk(gs, xs, g_ring, x_ring, bar, b, t, p, d, stage)
            stage, phase = after(stage, phase)


@gluon.jit
def done(part, part_1, chunks: gl.constexpr, BIAS: gl.constexpr):  # type: ignore[no-untyped-def]
    """Wait until all products but those of the last so many chunks, or few tokens, are there."""
    if BIAS:
        part, part_1 = warpgroup_mma_wait(2 * chunks, deps=[part, part_1])
    else:
        part = warpgroup_mma_wait(chunks, deps=[part])
    return part, part_1


@gluon.jit
def segment(  # type: ignore[no-untyped-def]
    part, part_1, rings, step, stage, phase, GROUP: gl.constexpr, FULL: gl.constexpr,
    TAIL: gl.constexpr, HAS_FEW: gl.constexpr, BIAS: gl.constexpr,
):  # fmt: skip
    """One group's rows of the products of one segment of one sample; with BIAS those with ones."""
    g_ring, x_ring, few, ones, ready, empty = rings
    g_few, x_few = few
    CHUNKS: gl.constexpr = FULL + (1 if TAIL > 0 else 0)
    before = stage
    for chunk in gl.static_range(CHUNKS):
        mbarrier.wait(ready.index(stage), phase)
        g = g_ring.index(GROUPS * stage + GROUP).reshape([CHUNK, ROWS])
        x = x_ring.index(stage).reshape([CHUNK, COLUMNS])
        if chunk == FULL:
            g = g.slice(0, TAIL)
            x = x.slice(0, TAIL)
        part = warpgroup_mma(g.permute([1, 0]), x, part, use_acc=chunk > 0, is_async=True)
        if BIAS:
            one = ones.slice(0, TAIL) if chunk == FULL else ones
            part_1 = warpgroup_mma(g.permute([1, 0]), one, part_1, use_acc=chunk > 0, is_async=True)
        if HAS_FEW and chunk == CHUNKS - 1:
            side = step % SIDES
            g = g_few.index(GROUPS * side + GROUP).reshape([FEW, ROWS]).permute([1, 0])
            x = x_few.index(side).reshape([FEW, COLUMNS])
            part = warpgroup_mma(g, x, part, is_async=True)
            if BIAS:
                part_1 = warpgroup_mma(g, ones.slice(0, FEW), part_1, is_async=True)
        if chunk > 0:
            # The products of the chunk before are done: its buffers may be filled again.
            if HAS_FEW and chunk == CHUNKS - 1:
                part, part_1 = done(part, part_1, 2, BIAS)
            else:
                part, part_1 = done(part, part_1, 1, BIAS)
            group_barrier()
            mbarrier.arrive(empty.index(before), count=1)
        before = stage
        stage, phase = after(stage, phase)
    part, part_1 = done(part, part_1, 0, BIAS)
    group_barrier()
    mbarrier.arrive(empty.index(before), count=1)
    return part, part_1, stage, phase


@gluon.jit
def zeros():  # type: ignore[no-untyped-def]
    """One group's rows of a block, and of products with ones."""
    part = gl.zeros((ROWS, COLUMNS), gl.float32, held(COLUMNS))
    return part, gl.zeros((ROWS, ONES), gl.float32, held(ONES))


def fix_keys(*functions: Any) -> None:
    """Have functions hashed now, in an order in which none comes before what it calls.

    Triton keeps compiled kernels on disk under a hash. A function is hashed when it is first
    needed, and the constants that its callees use are part of its hash only if these were hashed
    earlier. So without this a kernel's hash, and whether it is found on disk, would depend on which
    kernel a process happens to need first.
    """
    for function in functions:
        _ = function.cache_key


fix_keys(after, tensor_of, source_of, buffers, load_chunk, load, done, segment, zeros)


def cut_of(tokens: int) -> dict[str, int]:
    """How a sample's tokens are cut into segments of chunks, and whether a few are left over.

    Where there is only one segment its length plays no part, and lengths with as many chunks share
    a compiled kernel. So a tail that is as long as a chunk is one.

    >>> cut_of(48) == cut_of(64)
    True
    >>> cut_of(197)
    {'segments': 1, 'SEGMENT': 0, 'FULL': 3, 'TAIL': 0, 'HAS_FEW': True}
    >>> cut_of(130)
    {'segments': 1, 'SEGMENT': 0, 'FULL': 2, 'TAIL': 16, 'HAS_FEW': False}
    >>> cut_of(1500)
    {'segments': 3, 'SEGMENT': 512, 'FULL': 8, 'TAIL': 0, 'HAS_FEW': False}
    """
    cut = segmentation(tokens)
    if cut["segments"] > 1:
        size = next(size for size in SEGMENTS if -tokens % size < CHUNK.value)
        cut = {"segments": -(-tokens // size), "SEGMENT": size, "FULL": size, "TAIL": 0}
    else:
        cut["FULL"] *= cut.pop("CHUNK")
        cut["SEGMENT"] = 0
    full = cut["FULL"] // CHUNK.value
    # A sample's few are loaded once the chunk so many stages before them is done with; by then the
    # few that lie in the same buffer, SIDES samples earlier, must be too.
    tail = cut["TAIL"]
    if tail == CHUNK.value:
        full, tail = full + 1, 0
    few = tail == FEW.value and full * SIDES.value >= STAGES.value
    return {**cut, "FULL": full, "TAIL": 0 if few else tail, "HAS_FEW": few}
