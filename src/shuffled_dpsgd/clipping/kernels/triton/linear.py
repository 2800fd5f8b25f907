"""Linear layers on a GPU: many layers of one shape in a single launch, nothing materialised.

Shapes: L layers, B samples, T tokens, D input features, P output features. Operands are bfloat16,
float16, or float32, which Triton multiplies as three products of TF32 ("tf32x3"); that keeps some
22 bits of a number. Every product is accumulated in float32. The tensors of the L layers are found
through tables of addresses, so captured activations are read where they lie.

This file has the norms by Gram matrices. `tiles` and `sums` multiply gradients out.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from shuffled_dpsgd.clipping.kernels import plain
from shuffled_dpsgd.clipping.kernels.triton.addresses import address_table
from shuffled_dpsgd.clipping.kernels.triton.device_limits import stages_that_fit

GRAM_BLOCK = 128
# Features read at a time, and stages of the pipeline where shared memory has room for them.
STEP, NUM_STAGES = 64, 4
ELEMENT = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@triton.jit
def tile_at(table, layer, ELEMENT: tl.constexpr):  # type: ignore[no-untyped-def]
    """The address of `layer`'s tensor, known to be a multiple of 16 bytes."""
    return tl.multiple_of(tl.load(table + layer).to(tl.pointer_type(ELEMENT)), 16)


@triton.jit
def add_product(a, b, acc):  # type: ignore[no-untyped-def]
    """acc + a b. Tensor cores cut sums of TF32 off more often, so these are added beside them."""
    if a.dtype == tl.float32:
        return acc + tl.dot(a, b, input_precision="tf32x3")
    return tl.dot(a, b, acc)


@triton.jit
def gram_block(  # type: ignore[no-untyped-def]
    base, rows, cols, T, WIDTH, stride, SAME: tl.constexpr, BLOCK: tl.constexpr,
    STEP: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """<a_row, a_col> of two blocks of tokens; past T they give zero. EVEN: no load needs a mask."""
    acc = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    k = tl.arange(0, STEP)
    row_ptrs = base + rows[:, None] * stride + k[None, :]
    col_ptrs = base + cols[:, None] * stride + k[None, :]
    for start in range(0, WIDTH, STEP):
        inside = (start + k)[None, :] < WIDTH
        if EVEN:
            a = tl.load(row_ptrs + start)
        else:
            a = tl.load(row_ptrs + start, mask=(rows < T)[:, None] & inside, other=0.0)
        if SAME:
            acc = add_product(a, tl.trans(a), acc)
        else:
            if EVEN:
                b = tl.load(col_ptrs + start)
            else:
                b = tl.load(col_ptrs + start, mask=(cols < T)[:, None] & inside, other=0.0)
            acc = add_product(a, tl.trans(b), acc)
    return acc


@triton.jit(do_not_specialize=["B", "T"])
def gram_kernel(  # type: ignore[no-untyped-def]
    x_table, g_table, out_LBN2, B, T, D, P, x_batch, x_row, g_batch, g_row,
    BIAS: tl.constexpr, NUM_BLOCKS: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
    EVEN_D: tl.constexpr, EVEN_P: tl.constexpr, ELEMENT: tl.constexpr,
):  # fmt: skip
    """Sums of <x_t, x_s> <g_t, g_s> and of |x_t| |g_t| for one pair of token blocks."""
    block, sample, layer = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    i = block // NUM_BLOCKS
    j = block % NUM_BLOCKS
    out = out_LBN2 + 2 * ((layer * B + sample) * NUM_BLOCKS * NUM_BLOCKS + block)
    if i > j:
        tl.store(out, 0.0)
        tl.store(out + 1, 0.0)
        return
    rows = i * BLOCK + tl.arange(0, BLOCK)
    cols = j * BLOCK + tl.arange(0, BLOCK)
    x = tile_at(x_table, layer, ELEMENT) + sample * x_batch
    g = tile_at(g_table, layer, ELEMENT) + sample * g_batch
    x_gram = gram_block(x, rows, cols, T, D, x_row, NUM_BLOCKS == 1, BLOCK, STEP, EVEN_D)
    g_gram = gram_block(g, rows, cols, T, P, g_row, NUM_BLOCKS == 1, BLOCK, STEP, EVEN_P)
    if BIAS:
        x_gram += 1.0
    # Tokens past the end have a zero row in g's Gram matrix; each off-diagonal pair counts twice.
    products = x_gram * g_gram
    total = tl.sum(products)
    tl.store(out, tl.where(i == j, total, 2.0 * total))
    lengths = tl.where(rows[:, None] == cols[None, :], tl.sqrt(tl.maximum(products, 0.0)), 0.0)
    tl.store(out + 1, tl.sum(lengths))


def gram_stages(block: int, num_blocks: int, of: Tensor) -> int:
    """Stages in which one block of tokens, or two different ones, are read."""
    tokens = min(num_blocks, 2) * block
    return stages_that_fit(NUM_STAGES, tokens * STEP * of.element_size(), of.device)


def gram_sq_norms(xs: Sequence[Tensor], gs: Sequence[Tensor], bias: bool) -> Tensor:
    """`plain.gram_sq_norms` of L layers of one shape, (L, B)."""
    (B, T, D), P, L = xs[0].shape, gs[0].shape[2], len(xs)
    x, g = xs[0], gs[0]
    block, num_blocks = blocks_of(T)
    table = address_table((xs, gs), x.device)
    out = torch.empty(L, B, num_blocks**2, 2, dtype=torch.float32, device=x.device)
    strides = x.stride(0), x.stride(1), g.stride(0), g.stride(1)
    gram_kernel[(num_blocks**2, B, L)](
        *table, out, B, T, D, P, *strides, BIAS=bias, NUM_BLOCKS=num_blocks, BLOCK=block, STEP=STEP,
        EVEN_D=T % block == 0 and D % STEP == 0, EVEN_P=T % block == 0 and P % STEP == 0,
        ELEMENT=ELEMENT[x.dtype], num_warps=8 if block == 128 else 4,
        num_stages=gram_stages(block, num_blocks, x),
    )  # fmt: skip
    squares_LB, reach_LB = out.sum(2).unbind(2)
    return plain.above_cut_off(squares_LB, reach_LB, D, P, dtype=x.dtype)


def blocks_of(tokens: int) -> tuple[int, int]:
    """Tokens of a block, and blocks of a sample."""
    block = min(GRAM_BLOCK, max(16, triton.next_power_of_2(tokens)))
    return block, triton.cdiv(tokens, block)
