"""Weighted sums of linear layers' gradients on Hopper, with loading and multiplying kept apart.

Shapes: L layers of one shape, B samples, T tokens, D input features, P output features. The sums
are those of `triton.sums`: every sample's product in float32, then scaled. The sums of biases are
computed in the same pass, as products with ones, because reading the gradients again takes longer.

A block of `triton.sums` multiplies, waits for the products, scales them, and multiplies again.
That leaves the matrix units idle for a third of the time. Here one group of warps scales while
another multiplies; see `products`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from shuffled_dpsgd.clipping.kernels.gluon.products import (
    COLUMNS,
    ELEMENT,
    GROUPS,
    ROWS,
    buffers,
    cut_of,
    fix_keys,
    load,
    segment,
    tensor_of,
    zeros,
)
from shuffled_dpsgd.clipping.kernels.triton.addresses import address_table


@gluon.jit
def write(  # type: ignore[no-untyped-def]
    out, total, rows_from, cols_from, P, D, row_stride, col_stride, add
):
    """Store a block of the (P, D) output, if `add` is not zero added to what is there."""
    layout: gl.constexpr = total.type.layout
    rows = rows_from + gl.arange(0, total.shape[0], layout=gl.SliceLayout(1, layout))
    cols = cols_from + gl.arange(0, total.shape[1], layout=gl.SliceLayout(0, layout))
    ptrs = out + rows.to(gl.int64)[:, None] * row_stride + cols.to(gl.int64)[None, :] * col_stride
    inside = (rows < P)[:, None] & (cols < D)[None, :]
    total += gl.load(ptrs, mask=inside & (add != 0), other=0.0)
    gl.store(ptrs, total, mask=inside)


@gluon.jit
def add_up(  # type: ignore[no-untyped-def]
    todo, geometry, rings, GROUP: gl.constexpr, FULL: gl.constexpr, TAIL: gl.constexpr,
    HAS_FEW: gl.constexpr, BIAS: gl.constexpr,
):  # fmt: skip
    """One group's rows of the block, with BIAS also of the bias, as products with ones."""
    factors_B, out, bias, out_row, out_col, add = todo
    B, segments, D, P, p, d = geometry
    total, total_1 = zeros()
    part, part_1 = zeros()
    stage = 0
    phase = 0
    for step in range(B * segments):
        factor = gl.load(factors_B + step // segments)
        part, part_1, stage, phase = segment(
            part, part_1, rings, step, stage, phase,
            GROUP, FULL, TAIL, HAS_FEW, BIAS,
        )  # fmt: skip
        # A factor of zero must silence infinities and NaNs too.
        if factor != 0.0:
            total += factor * part
            if BIAS:
                total_1 += factor * part_1
    write(out, total, p + GROUP * ROWS, d, P, D, out_row, out_col, add)
    if BIAS:
        # All columns are the same; a matrix of one column takes the first.
        write(bias, total_1, p + GROUP * ROWS, 0, P, 1, 1, 1, add)


@gluon.jit
def run_groups(  # type: ignore[no-untyped-def]
    todo, source, geometry, rings, SEGMENT: gl.constexpr, FULL: gl.constexpr, TAIL: gl.constexpr,
    HAS_FEW: gl.constexpr, BIAS: gl.constexpr,
):  # fmt: skip
    """Three groups of warps multiply while one warp loads."""
    gl.warp_specialize(
        [
            (add_up, (todo, geometry, rings, gl.constexpr(0), FULL, TAIL, HAS_FEW, BIAS)),
            (add_up, (todo, geometry, rings, gl.constexpr(1), FULL, TAIL, HAS_FEW, BIAS)),
            (add_up, (todo, geometry, rings, gl.constexpr(2), FULL, TAIL, HAS_FEW, BIAS)),
            (load, (source, geometry, rings, SEGMENT, FULL, TAIL, HAS_FEW)),
        ],
        [4, 4, 1],
        [160, 160, 24],
    )


@gluon.jit(do_not_specialize=["B", "T", "add"])
def parted_outer_kernel(  # type: ignore[no-untyped-def]
    x_table, g_table, out_table, bias_table, factors_B, B, T, D, P,
    x_batch, x_row, g_batch, g_row, out_row, out_col, add, segments,
    SEGMENT: gl.constexpr, FULL: gl.constexpr, TAIL: gl.constexpr, HAS_FEW: gl.constexpr,
    BIAS: gl.constexpr, ELEMENT: gl.constexpr,
):  # fmt: skip
    """A block of sum_b f_b g_b^T x_b; with BIAS, the first columns also sum f_b g_bt."""
    layer = gl.program_id(1)
    blocks_d = gl.cdiv(D, COLUMNS)
    p = (gl.program_id(0) // blocks_d) * (GROUPS * ROWS)
    d = (gl.program_id(0) % blocks_d) * COLUMNS
    x = tensor_of(x_table, layer, ELEMENT)
    g = tensor_of(g_table, layer, ELEMENT)
    out = tensor_of(out_table, layer, gl.float32)
    bias = out
    if BIAS:
        bias = gl.load(bias_table + layer).to(gl.pointer_type(gl.float32))
    rings = buffers(HAS_FEW, BIAS, ELEMENT)
    source = (x, g, T, x_batch, x_row, g_batch, g_row)
    geometry = (B, segments, D, P, p, d)
    todo = (factors_B, out, bias, out_row, out_col, add)
    # Two specialised kinds of blocks, so that none has to ask at every product what to do.
    if BIAS and d == 0:
        run_groups(todo, source, geometry, rings, SEGMENT, FULL, TAIL, HAS_FEW, True)
    else:
        run_groups(todo, source, geometry, rings, SEGMENT, FULL, TAIL, HAS_FEW, False)


fix_keys(write, add_up, run_groups, parted_outer_kernel)


def scratch(size: int, alignment: int, stream: int | None) -> Tensor:
    """Device memory for a launch's copy-engine descriptors."""
    return torch.empty(size, dtype=torch.int8, device="cuda")


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
    strides = x.stride(0), x.stride(1), g.stride(0), g.stride(1), *outs[0].stride()
    blocks = triton.cdiv(P, GROUPS.value * ROWS.value) * triton.cdiv(D, COLUMNS.value)
    parted_outer_kernel[(blocks, L)](
        *table, factors_B, B, T, D, P, *strides, int(add), **cut_of(T),
        BIAS=len(biases) > 0, ELEMENT=ELEMENT[x.dtype], num_warps=4,
    )  # fmt: skip
