"""Norms by Gram matrices on Hopper for samples of a few more than 128 tokens, such as ViT's 197.

Shapes: L layers of one shape, B samples, T tokens, D input features, P output features, S tokens of
a strip. The norms are those of `triton.gram`: a Gram matrix of the inputs, one of the output
gradients, and the sum of their products entry by entry. Both matrices are symmetric, so they are
computed in strips of 64 tokens against all tokens from there on.

One block computes both matrices of a sample and so reads every number once. One warp loads tokens,
some features at a time, and two groups of four warps multiply strips of them. A group has no
registers for two matrices, so the inputs' matrix stays in shared memory while the gradients' is
computed. A block goes on to further samples: the next one is loaded while a result is written.
This is Gluon for the same reason as `products`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma_wait,
)

from shuffled_dpsgd.clipping.kernels import plain
from shuffled_dpsgd.clipping.kernels.gluon.compatibility import begin_load, fix_keys, group_barrier
from shuffled_dpsgd.clipping.kernels.gluon.ring import (
    ELEMENT,
    after,
    barriers,
    before,
    even_share,
    held,
    source_of,
    times,
)
from shuffled_dpsgd.clipping.kernels.triton.addresses import address_table
from shuffled_dpsgd.clipping.kernels.triton.device_limits import multiprocessors
from shuffled_dpsgd.clipping.kernels.triton.sums import scratch

# Tokens of a strip, of the first two strips, and of the last and narrow one.
STRIP = gl.constexpr(64)
HEAD = gl.constexpr(128)
NARROW = gl.constexpr(16)
NARROW_FROM = HEAD.value + STRIP.value
MIN_TOKENS, MAX_TOKENS = HEAD.value + 1, NARROW_FROM + NARROW.value
# Features in a load, loads in flight, and registers of a multiplying group and of the loader.
CHUNK = gl.constexpr(64)
STAGES = gl.constexpr(4)
MULTIPLYING_REGISTERS = gl.constexpr(224)
LOADING_REGISTERS = gl.constexpr(56)


@gluon.constexpr_function
def resting(N):  # type: ignore[no-untyped-def]
    """How a strip against N tokens lies in shared memory: its rows begin in different banks."""
    return gl.SwizzledSharedLayout(8, 1, min(8, N // 8), [1, 0])


@gluon.jit
def load_features(head, strip, sample, width, rings, stage, phase, LAST: gl.constexpr):  # type: ignore[no-untyped-def]
    """Fill the rings with all features of a sample's tokens; what lies outside becomes zero."""
    head_ring, strip_ring, last_ring, ready, empty = rings
    for first in range(0, width, CHUNK):
        bar = ready.index(stage)
        mbarrier.wait(empty.index(stage), phase ^ 1)
        mbarrier.expect(bar, CHUNK * (HEAD + STRIP + (STRIP if LAST else 0)) * 2)
        at = [sample, 0, first]
        begin_load(head, at, bar, head_ring.index(stage))
        at = [sample, HEAD, first]
        begin_load(strip, at, bar, strip_ring.index(stage))
        if LAST:
            at = [sample, HEAD + STRIP, first]
            begin_load(strip, at, bar, last_ring.index(stage))
        stage, phase = after(stage, phase, STAGES)
    return stage, phase


@gluon.jit
def load(x, g, geometry, span, rings, LAST: gl.constexpr):  # type: ignore[no-untyped-def]
    """Load inputs and gradients of one sample after the other."""
    B, T, D, P, x_batch, x_row, g_batch, g_row = geometry
    first_sample, step = span
    head_ring, strip_ring, _, _, _ = rings
    x_head = source_of(head_ring, x, B, T, D, x_batch, x_row)
    x_strip = source_of(strip_ring, x, B, T, D, x_batch, x_row)
    g_head = source_of(head_ring, g, B, T, P, g_batch, g_row)
    g_strip = source_of(strip_ring, g, B, T, P, g_batch, g_row)
    stage = 0
    phase = 0
    for sample in range(first_sample, B, step):
        stage, phase = load_features(x_head, x_strip, sample, D, rings, stage, phase, LAST)
        stage, phase = load_features(g_head, g_strip, sample, P, rings, stage, phase, LAST)


@gluon.jit
def done(  # type: ignore[no-untyped-def]
    first, middle, own, last, corner,
    chunks: gl.constexpr, GROUP: gl.constexpr, LAST: gl.constexpr,
):  # fmt: skip
    """Wait until all products but those of the last `chunks` loads are there."""
    if GROUP == 0:
        if LAST:
            first, middle, last, corner = warpgroup_mma_wait(
                4 * chunks, deps=[first, middle, last, corner]
            )
        else:
            first, middle = warpgroup_mma_wait(2 * chunks, deps=[first, middle])
    else:
        if LAST:
            first, middle, own, last, corner = warpgroup_mma_wait(
                5 * chunks, deps=[first, middle, own, last, corner]
            )
        else:
            first, middle, own = warpgroup_mma_wait(3 * chunks, deps=[first, middle, own])
    return first, middle, own, last, corner


@gluon.jit
def gram(width, rings, stage, phase, GROUP: gl.constexpr, LAST: gl.constexpr):  # type: ignore[no-untyped-def]
    """A group's blocks of a sample's Gram matrix.

    Group 0 has the first strip against the first two (`first`), the third (`middle`) and the
    narrow one (`last`), and this against itself (`corner`). Group 1 has the second strip against
    itself, the third and the narrow one, and the third against itself (`own`) and the narrow one
    (`corner`). Both have the same number of products.
    """
    head_ring, strip_ring, last_ring, ready, empty = rings
    FIRST: gl.constexpr = HEAD if GROUP == 0 else STRIP
    first = gl.zeros((STRIP, FIRST), gl.float32, held(FIRST))
    middle = gl.zeros((STRIP, STRIP), gl.float32, held(STRIP))
    own = gl.zeros((STRIP, STRIP), gl.float32, held(STRIP))
    last = gl.zeros((STRIP, NARROW), gl.float32, held(NARROW))
    corner = gl.zeros((STRIP, NARROW), gl.float32, held(NARROW))
    for step in range(gl.cdiv(width, CHUNK)):
        mbarrier.wait(ready.index(stage), phase)
        head = head_ring.index(stage).reshape([HEAD, CHUNK])
        third = strip_ring.index(stage).reshape([STRIP, CHUNK])
        rows = head.slice(GROUP * STRIP, STRIP)
        first = times(rows, head if GROUP == 0 else rows, first, step)
        middle = times(rows, third, middle, step)
        if GROUP == 1:
            own = times(third, third, own, step)
        if LAST:
            few = last_ring.index(stage).reshape([STRIP, CHUNK])
            last = times(rows, few.slice(0, NARROW), last, step)
            corner = times(few if GROUP == 0 else third, few.slice(0, NARROW), corner, step)
        # The products of the load before are done: its buffers may be filled again.
        first, middle, own, last, corner = done(first, middle, own, last, corner, 1, GROUP, LAST)
        group_barrier()
        mbarrier.arrive(empty.index(before(stage, STAGES)), count=1, pred=step > 0)
        stage, phase = after(stage, phase, STAGES)
    first, middle, own, last, corner = done(first, middle, own, last, corner, 0, GROUP, LAST)
    group_barrier()
    mbarrier.arrive(empty.index(before(stage, STAGES)), count=1)
    return first, middle, own, last, corner, stage, phase


@gluon.jit
def weigh(products, rows_from: gl.constexpr, cols_from: gl.constexpr):  # type: ignore[no-untyped-def]
    """The sum of each row of a strip's products, and |x_t| |g_t| where it meets itself.

    Two different strips meet once and count twice.
    """
    layout: gl.constexpr = products.type.layout
    rows = rows_from + gl.arange(0, products.shape[0], layout=gl.SliceLayout(1, layout))[:, None]
    cols = cols_from + gl.arange(0, products.shape[1], layout=gl.SliceLayout(0, layout))[None, :]
    common: gl.constexpr = gl.SliceLayout(1, held(STRIP))
    if rows_from == cols_from:
        total = gl.sum(gl.where(cols < rows_from + STRIP, products, 2.0 * products), 1)
        squares = gl.sum(gl.where(rows == cols, products, 0.0), 1)
        lengths = gl.convert_layout(gl.sqrt(gl.maximum(squares, 0.0)), common)
    else:
        total = 2.0 * gl.sum(products, 1)
        lengths = gl.zeros([STRIP], gl.float32, common)
    return gl.convert_layout(total, common), lengths


@gluon.jit
def multiply(  # type: ignore[no-untyped-def]
    out_LB22S, layer, B, D, P, span, rings, rest_first, rest_middle, rest_own,
    GROUP: gl.constexpr, LAST: gl.constexpr, BIAS: gl.constexpr,
):  # fmt: skip
    """One group's share of both Gram matrices, sample after sample: by row, products and lengths.

    Tokens past the end have zeros in g's products.
    """
    first_sample, step = span
    one: gl.constexpr = 1.0 if BIAS else 0.0
    start: gl.constexpr = GROUP * STRIP
    end: gl.constexpr = HEAD + STRIP
    stage = 0
    phase = 0
    for sample in range(first_sample, B, step):
        x_first, x_middle, x_own, x_last, x_corner, stage, phase = gram(
            D, rings, stage, phase, GROUP, LAST
        )
        rest_first.store(x_first + one)
        rest_middle.store(x_middle + one)
        if GROUP == 1:
            rest_own.store(x_own + one)
        g_first, g_middle, g_own, g_last, g_corner, stage, phase = gram(
            P, rings, stage, phase, GROUP, LAST
        )
        total, lengths = weigh(rest_first.load(g_first.type.layout) * g_first, start, start)
        more, _ = weigh(rest_middle.load(held(STRIP)) * g_middle, start, HEAD)
        total += more
        if GROUP == 1:
            more, longer = weigh(rest_own.load(held(STRIP)) * g_own, HEAD, HEAD)
            total += more
            lengths += longer
        if LAST:
            more, _ = weigh((x_last + one) * g_last, start, end)
            total += more
            more, longer = weigh((x_corner + one) * g_corner, end if GROUP == 0 else HEAD, end)
            total += more
            lengths += longer
        rows = gl.arange(0, STRIP, layout=gl.SliceLayout(1, held(STRIP)))
        out = out_LB22S + ((layer * B + sample) * 2 + GROUP) * (2 * STRIP) + rows
        gl.store(out, total)
        gl.store(out + STRIP, lengths)


@gluon.jit(do_not_specialize=["B"])
def strip_gram_kernel(  # type: ignore[no-untyped-def]
    x_table, g_table, out_LB22S, B, T, D, P, x_batch, x_row, g_batch, g_row,
    BIAS: gl.constexpr, LAST: gl.constexpr, ELEMENT: gl.constexpr,
):  # fmt: skip
    """Some samples of one layer; LAST says that they have tokens in the narrow strip."""
    layer = gl.program_id(1)
    x = gl.multiple_of(gl.load(x_table + layer).to(gl.pointer_type(ELEMENT)), 16)
    g = gl.multiple_of(gl.load(g_table + layer).to(gl.pointer_type(ELEMENT)), 16)
    of_head: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, HEAD, CHUNK], ELEMENT)
    of_strip: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, STRIP, CHUNK], ELEMENT)
    head_ring = gl.allocate_shared_memory(ELEMENT, [STAGES, 1, HEAD, CHUNK], of_head)
    strip_ring = gl.allocate_shared_memory(ELEMENT, [STAGES, 1, STRIP, CHUNK], of_strip)
    if LAST:
        # The matrix units want 64 rows on the left: those past the narrow strip are zero.
        last_ring = gl.allocate_shared_memory(ELEMENT, [STAGES, 1, STRIP, CHUNK], of_strip)
    else:
        last_ring = strip_ring
    ready, empty = barriers(STAGES, 2)
    fence_async_shared()
    first_0 = gl.allocate_shared_memory(gl.float32, [STRIP, HEAD], resting(HEAD))
    first_1 = gl.allocate_shared_memory(gl.float32, [STRIP, STRIP], resting(STRIP))
    middle_0 = gl.allocate_shared_memory(gl.float32, [STRIP, STRIP], resting(STRIP))
    middle_1 = gl.allocate_shared_memory(gl.float32, [STRIP, STRIP], resting(STRIP))
    own_1 = gl.allocate_shared_memory(gl.float32, [STRIP, STRIP], resting(STRIP))
    geometry = (B, T, D, P, x_batch, x_row, g_batch, g_row)
    span = (gl.program_id(0), gl.num_programs(0))
    rings = (head_ring, strip_ring, last_ring, ready, empty)
    gl.warp_specialize(
        [
            (multiply, (out_LB22S, layer, B, D, P, span, rings, first_0, middle_0, own_1,
                        gl.constexpr(0), LAST, BIAS)),
            (multiply, (out_LB22S, layer, B, D, P, span, rings, first_1, middle_1, own_1,
                        gl.constexpr(1), LAST, BIAS)),
            (load, (x, g, geometry, span, rings, LAST)),
        ],
        [4, 1],
        [MULTIPLYING_REGISTERS, LOADING_REGISTERS],
    )  # fmt: skip


fix_keys(load_features, load, done, gram, weigh, multiply, strip_gram_kernel)


def gram_sq_norms(xs: Sequence[Tensor], gs: Sequence[Tensor], bias: bool) -> Tensor:
    """`plain.gram_sq_norms` of L layers of one shape, (L, B); T from MIN_TOKENS to MAX_TOKENS."""
    (B, T, D), P, L = xs[0].shape, gs[0].shape[2], len(xs)
    x, g = xs[0], gs[0]
    table = address_table((xs, gs), x.device)
    out = torch.empty(L, B, 2, 2, STRIP.value, dtype=torch.float32, device=x.device)
    triton.set_allocator(scratch)
    strides = x.stride(0), x.stride(1), g.stride(0), g.stride(1)
    grid = even_share(L, B, multiprocessors(x.device)), L
    strip_gram_kernel[grid](
        *table, out, B, T, D, P, *strides,
        BIAS=bias, LAST=T > NARROW_FROM, ELEMENT=ELEMENT[x.dtype], num_warps=4,
    )  # fmt: skip
    squares_LB, reach_LB = out.sum((2, 4)).unbind(2)
    return plain.above_cut_off(squares_LB, reach_LB, D, P)
