"""Norms of linear layers from their products on Hopper; the products are kept where that is wanted.

Shapes: L layers of one shape, B samples, T tokens, D input features, P output features, N numbers
that add up to a square. The products are those that `weighted_sums` scales and adds up, bit for
bit. So a sample's contribution to a sum is as long as its norm says, whatever the matrix units have
cut off. No bound on that is needed, and nothing has to be read for one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from shuffled_dpsgd.clipping.kernels.gluon.compatibility import fix_keys
from shuffled_dpsgd.clipping.kernels.gluon.products import (
    FEWEST_STAGES,
    ONES,
    ROWS,
    ProductBlock,
    block_at,
    buffers,
    cut_of,
    load,
    segment,
    tensor_of,
    zeros,
)
from shuffled_dpsgd.clipping.kernels.gluon.ring import ELEMENT, scratch
from shuffled_dpsgd.clipping.kernels.triton.addresses import address_table

# Warps of a group, each of which leaves the sum of its squares, and numbers that a block leaves.
WARPS = gl.constexpr(4)
LEFT = gl.constexpr(8)
# Blocks of one layer that keep a GPU busy: several rounds, the last of which may not be full.
MIN_BLOCKS = 512
# Two groups each, because of the registers. Wide blocks are taken where they waste at most a tenth
# of their columns.
WIDE = ProductBlock(groups=2, columns=256, stages=FEWEST_STAGES)
NARROW = ProductBlock(groups=2, columns=128, stages=6)
MOST_WASTE = 1.1
# Head room for rounding. At most 128 squares are added one after the other, each sum being rounded:
# those of a thread, of a row and of a warp. The rest is added pairwise.
ROUNDING = 2.0**-24 * 128


@gluon.jit
def keep(  # type: ignore[no-untyped-def]
    out, product, first_row, first_col, P, D, ROW: gl.constexpr, COL: gl.constexpr
):
    """Store a block of a product of these strides."""
    layout: gl.constexpr = product.type.layout
    # Zero, but the compiler does not know. Otherwise it would compute the addresses before the loop
    # over samples, where there are no registers for them.
    zero = gl.inline_asm_elementwise("mov.u32 $0, 0;", "=r,r", [first_row], gl.int32, False, 1)
    out += (first_row + zero).to(gl.int64) * ROW + first_col * COL
    rows = gl.arange(0, product.shape[0], layout=gl.SliceLayout(1, layout))
    cols = gl.arange(0, product.shape[1], layout=gl.SliceLayout(0, layout))
    inside = (rows < P - first_row)[:, None] & (cols < D - first_col)[None, :]
    gl.store(out + (rows[:, None] * ROW + cols[None, :] * COL), product, mask=inside)


@gluon.jit
def row_squares(product):  # type: ignore[no-untyped-def]
    """The squared lengths of rows."""
    return gl.sum(product * product, 1)


@gluon.jit
def square(  # type: ignore[no-untyped-def]
    todo, geometry, rings, GROUP: gl.constexpr, FULL: gl.constexpr, TAIL: gl.constexpr,
    GROUPS: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr, HAS_FEW: gl.constexpr,
    BIAS: gl.constexpr, ONE: gl.constexpr, KEEP: gl.constexpr, ROW: gl.constexpr,
    COL: gl.constexpr,
):  # fmt: skip
    """One group's rows of the block, sample by sample: their squares, and with KEEP themselves.

    ONE says that a sample is one segment, whose products are the sample's.
    """
    squares, squares_batch, kept, kept_batch = todo
    B, segments, D, P, p, d = geometry
    part, part_1 = zeros(COLUMNS)
    stage = 0
    phase = 0
    for b in range(B):
        if ONE:
            part, part_1, stage, phase = segment(
                part, part_1, rings, b, stage, phase,
                GROUP, FULL, TAIL, GROUPS, COLUMNS, STAGES, HAS_FEW, BIAS,
            )  # fmt: skip
            whole = part
            whole_1 = part_1
        else:
            whole, whole_1 = zeros(COLUMNS)
            for number in range(segments):
                part, part_1, stage, phase = segment(
                    part, part_1, rings, b * segments + number, stage, phase,
                    GROUP, FULL, TAIL, GROUPS, COLUMNS, STAGES, HAS_FEW, BIAS,
                )  # fmt: skip
                whole += part
                if BIAS:
                    whole_1 += part_1
        rows = row_squares(whole)
        if BIAS:
            # All columns are the same.
            rows += gl.convert_layout(row_squares(whole_1), rows.type.layout) / ONES
        sums = gl.sum(rows.reshape([WARPS, ROWS // WARPS]), 1)
        warps = gl.arange(0, WARPS, layout=sums.type.layout)
        gl.store(squares + gl.cast(b, gl.int64) * squares_batch + GROUP * WARPS + warps, sums)
        if KEEP:
            out = kept + gl.cast(b, gl.int64) * kept_batch
            keep(out, whole, p + GROUP * ROWS, d, P, D, ROW, COL)


@gluon.jit
def run_groups(  # type: ignore[no-untyped-def]
    todo, source, geometry, rings, SEGMENT: gl.constexpr, FULL: gl.constexpr, TAIL: gl.constexpr,
    GROUPS: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr, HAS_FEW: gl.constexpr,
    BIAS: gl.constexpr, ONE: gl.constexpr, KEEP: gl.constexpr, ROW: gl.constexpr,
    COL: gl.constexpr,
):  # fmt: skip
    """Two groups of warps multiply while one warp loads."""
    gl.warp_specialize(
        [
            (square, (todo, geometry, rings, gl.constexpr(0), FULL, TAIL, GROUPS, COLUMNS, STAGES,
                      HAS_FEW, BIAS, ONE, KEEP, ROW, COL)),
            (square, (todo, geometry, rings, gl.constexpr(1), FULL, TAIL, GROUPS, COLUMNS, STAGES,
                      HAS_FEW, BIAS, ONE, KEEP, ROW, COL)),
            (load, (source, geometry, rings, SEGMENT, FULL, TAIL, GROUPS, COLUMNS, STAGES,
                    HAS_FEW)),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip


@gluon.jit(do_not_specialize=["B", "T"])
def square_kernel(  # type: ignore[no-untyped-def]
    x_table, g_table, kept_table, squares_LBN, B, T, D, P, x_batch, x_row, g_batch, g_row,
    kept_batch, segments, ROW: gl.constexpr, COL: gl.constexpr, SEGMENT: gl.constexpr,
    FULL: gl.constexpr, TAIL: gl.constexpr, GROUPS: gl.constexpr, COLUMNS: gl.constexpr,
    STAGES: gl.constexpr, HAS_FEW: gl.constexpr, BIAS: gl.constexpr, ONE: gl.constexpr,
    KEEP: gl.constexpr, ELEMENT: gl.constexpr,
):  # fmt: skip
    """The squares of one block of every sample's g^T x in one layer.

    With BIAS, blocks of the first columns also square their rows of sum_t g_t.
    """
    layer = gl.program_id(1)
    p, d = block_at(gl.program_id(0), D, GROUPS, COLUMNS)
    x = tensor_of(x_table, layer, ELEMENT)
    g = tensor_of(g_table, layer, ELEMENT)
    kept = tensor_of(kept_table, layer, gl.float32)
    squares_batch = gl.num_programs(0) * LEFT
    squares = squares_LBN + layer.to(gl.int64) * B * squares_batch + gl.program_id(0) * LEFT
    rings = buffers(GROUPS, COLUMNS, STAGES, HAS_FEW, BIAS, ELEMENT)
    source = (x, g, T, x_batch, x_row, g_batch, g_row)
    geometry = (B, segments, D, P, p, d)
    todo = (squares, squares_batch, kept, kept_batch)
    # Two specialised kinds of blocks, so that none has to ask at every product what to do.
    if BIAS and d == 0:
        run_groups(
            todo, source, geometry, rings,
            SEGMENT, FULL, TAIL, GROUPS, COLUMNS, STAGES, HAS_FEW, True, ONE, KEEP, ROW, COL,
        )  # fmt: skip
    else:
        run_groups(
            todo, source, geometry, rings,
            SEGMENT, FULL, TAIL, GROUPS, COLUMNS, STAGES, HAS_FEW, False, ONE, KEEP, ROW, COL,
        )  # fmt: skip


fix_keys(keep, row_squares, square, run_groups, square_kernel)


def block_for(tokens: int, columns: int) -> ProductBlock:
    """The block for samples of so many tokens.

    A wide one has registers for one product only, so a sample must be one segment.
    """
    fits = -(-columns // WIDE.columns) * WIDE.columns <= MOST_WASTE * columns
    return WIDE if fits and cut_of(tokens, WIDE.stages)["segments"] == 1 else NARROW


def fills_gpu(tokens: int, rows: int, columns: int) -> bool:
    """Whether the blocks of one product of this size keep a whole GPU busy."""
    return block_for(tokens, columns).number(rows, columns) >= MIN_BLOCKS


def tile_sq_norms(
    xs: Sequence[Tensor], gs: Sequence[Tensor], bias: bool, keep: Sequence[Tensor] = ()
) -> Tensor:
    """`plain.tile_sq_norms` of L layers of one shape, (L, B).

    The products are left in `keep`, if given: float32, (B, P, D), or transposed views of such.
    """
    (B, T, D), P, L = xs[0].shape, gs[0].shape[2], len(xs)
    x, g = xs[0], gs[0]
    table = address_table((xs, gs, keep or xs), x.device)
    triton.set_allocator(scratch)
    block = block_for(T, D)
    blocks, cut = block.number(P, D), block.of(T)
    squares = torch.empty(L, B, blocks * LEFT.value, dtype=torch.float32, device=x.device)
    strides = x.stride(0), x.stride(1), g.stride(0), g.stride(1)
    batch, row, col = keep[0].stride() if keep else (0, 0, 0)
    square_kernel[(blocks, L)](
        *table, squares, B, T, D, P, *strides, batch, ROW=row, COL=col, **cut, BIAS=bias,
        ONE=cut["segments"] == 1, KEEP=len(keep) > 0, ELEMENT=ELEMENT[x.dtype], num_warps=4,
    )  # fmt: skip
    return squares.sum(2).mul_(1.0 + ROUNDING)
