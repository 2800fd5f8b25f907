"""Linear layers on a GPU: many layers of one shape in a single launch, nothing materialised.

Shapes: L layers, B samples, T tokens, D input features, P output features. Operands are bfloat16
or float16; every product is accumulated in float32. The tensors of the L layers are found through
tables of addresses, so captured activations are read where they lie.

Why the weighted sum is a kernel of its own: scaling bfloat16 rows by a clip factor would round
them again, and a sample could then contribute a part in 256 more than the clip norm. Here each
sample's product is formed in float32 and scaled in float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from shuffled_dpsgd.clipping.kernels import plain

GRAM_BLOCK = 128
# Enough programs to fill the largest current GPUs twice.
TARGET_PROGRAMS = 264
# Tokens a weighted sum takes from one sample at a time when the whole sample is too long.
LONG_SEGMENT = 128
ELEMENT = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def address_table(columns: Sequence[Sequence[Tensor]], device: torch.device) -> Tensor:
    """The tensors' addresses, one row per column of tensors, sent without waiting for the GPU."""
    rows = [[tensor.data_ptr() for tensor in column] for column in columns]
    table = torch.tensor(rows, dtype=torch.int64)
    if device.type == "cuda":
        table = table.pin_memory().to(device, non_blocking=True)
    return table


@triton.jit
def tile_at(table, layer, ELEMENT: tl.constexpr):  # type: ignore[no-untyped-def]
    """The address of `layer`'s tensor, known to be a multiple of 16 bytes."""
    return tl.multiple_of(tl.load(table + layer).to(tl.pointer_type(ELEMENT)), 16)


@triton.jit
def gram_block(  # type: ignore[no-untyped-def]
    base, rows, cols, T, WIDTH, stride, SAME: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr
):
    """<a_row, a_col> of two blocks of tokens, (BLOCK, BLOCK) float32."""
    acc = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    k = tl.arange(0, STEP)
    row_ptrs = base + rows[:, None] * stride + k[None, :]
    col_ptrs = base + cols[:, None] * stride + k[None, :]
    for start in range(0, WIDTH, STEP):
        inside = (start + k)[None, :] < WIDTH
        a = tl.load(row_ptrs + start, mask=(rows < T)[:, None] & inside, other=0.0)
        if SAME:
            acc = tl.dot(a, tl.trans(a), acc)
        else:
            b = tl.load(col_ptrs + start, mask=(cols < T)[:, None] & inside, other=0.0)
            acc = tl.dot(a, tl.trans(b), acc)
    return acc


@triton.jit
def gram_kernel(  # type: ignore[no-untyped-def]
    x_table, g_table, out_LBN, B, T, D, P, x_batch, x_row, g_batch, g_row,
    BIAS: tl.constexpr, NUM_BLOCKS: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
    ELEMENT: tl.constexpr,
):  # fmt: skip
    """One pair of token blocks of one sample of one layer: sum of <x_t, x_s> <g_t, g_s>."""
    block, sample, layer = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    i = block // NUM_BLOCKS
    j = block % NUM_BLOCKS
    out = out_LBN + (layer * B + sample) * NUM_BLOCKS * NUM_BLOCKS + block
    if i > j:
        tl.store(out, 0.0)
        return
    rows = i * BLOCK + tl.arange(0, BLOCK)
    cols = j * BLOCK + tl.arange(0, BLOCK)
    x = tile_at(x_table, layer, ELEMENT) + sample * x_batch
    g = tile_at(g_table, layer, ELEMENT) + sample * g_batch
    x_gram = gram_block(x, rows, cols, T, D, x_row, NUM_BLOCKS == 1, BLOCK, STEP)
    g_gram = gram_block(g, rows, cols, T, P, g_row, NUM_BLOCKS == 1, BLOCK, STEP)
    if BIAS:
        x_gram += 1.0
    # Tokens past the end have a zero row in g's Gram matrix; each off-diagonal pair counts twice.
    total = tl.sum(x_gram * g_gram)
    tl.store(out, tl.where(i == j, total, 2.0 * total))


def gram_sq_norms(xs: Sequence[Tensor], gs: Sequence[Tensor], bias: bool) -> Tensor:
    """`plain.gram_sq_norms` of L layers of one shape, (L, B)."""
    (B, T, D), P, L = xs[0].shape, gs[0].shape[2], len(xs)
    x, g = xs[0], gs[0]
    block = min(GRAM_BLOCK, max(16, triton.next_power_of_2(T)))
    num_blocks = triton.cdiv(T, block)
    table = address_table((xs, gs), x.device)
    out = torch.empty(L, B, num_blocks**2, dtype=torch.float32, device=x.device)
    gram_kernel[(num_blocks**2, B, L)](
        table[0], table[1], out, B, T, D, P, x.stride(0), x.stride(1), g.stride(0), g.stride(1),
        BIAS=bias, NUM_BLOCKS=num_blocks, BLOCK=block, STEP=64, ELEMENT=ELEMENT[x.dtype],
        num_warps=8 if block == 128 else 4, num_stages=4,
    )  # fmt: skip
    return out.sum(2).clamp_(min=0.0).mul_(plain.tensor_core_slack(D, P))


@triton.jit
def split_gram_kernel(  # type: ignore[no-untyped-def]
    g, out_SBTT, B, T, P, g_batch, g_row, share,
    BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """The share of <g_t, g_s> that one slice of the features gives, for one sample."""
    part, sample = tl.program_id(0), tl.program_id(1).to(tl.int64)
    t = tl.arange(0, BLOCK)
    first = part * share
    width = tl.minimum(share, P - first)
    gram = gram_block(g + sample * g_batch + first, t, t, T, width, g_row, True, BLOCK, STEP)
    out = out_SBTT + (part * B + sample) * T * T + t[:, None] * T + t[None, :]
    tl.store(out, gram, mask=(t < T)[:, None] & (t < T)[None, :])


def wide_gram_sq_norms(x_BTD: Tensor, g_BTP: Tensor, bias: bool) -> Tensor:
    """`plain.gram_sq_norms` of one layer with very many outputs, such as a vocabulary head.

    One program per sample would leave most of the GPU idle, so the features are shared out; the
    (T, T) matrices are written down, which is small beside the gradient itself. T is at most
    GRAM_BLOCK.
    """
    (B, T, _), P = x_BTD.shape, g_BTP.shape[2]
    parts = max(1, min(16, triton.cdiv(TARGET_PROGRAMS, B)))
    share = triton.cdiv(triton.cdiv(P, parts), 64) * 64
    parts = triton.cdiv(P, share)
    block = max(16, triton.next_power_of_2(T))
    out = torch.empty(parts, B, T, T, dtype=torch.float32, device=g_BTP.device)
    split_gram_kernel[(parts, B)](
        g_BTP, out, B, T, P, g_BTP.stride(0), g_BTP.stride(1), share,
        BLOCK=block, STEP=64, num_warps=8 if block == 128 else 4, num_stages=4,
    )  # fmt: skip
    x_gram = torch.bmm(x_BTD, x_BTD.mT, out_dtype=torch.float32)
    if bias:
        x_gram += 1.0
    squares_B = (out.sum(0) * x_gram).sum((1, 2)).clamp_(min=0.0)
    return squares_B.mul_(plain.tensor_core_slack(x_BTD.shape[2], share))


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
    return tl.dot(tl.trans(g_tile), x_tile, acc)


@triton.jit
def outer_kernel(  # type: ignore[no-untyped-def]
    x_table, g_table, out_table, factors_B, B, T, D, P, x_batch, x_row, g_batch, g_row,
    segments, SEGMENT: tl.constexpr, FULL: tl.constexpr, CHUNK: tl.constexpr, TAIL: tl.constexpr,
    EVEN_T: tl.constexpr, EVEN_P: tl.constexpr, EVEN_D: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr, ELEMENT: tl.constexpr,
):  # fmt: skip
    """One tile of one layer's sum_b f_b g_b^T x_b, added to what the output holds.

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
    total += tl.load(out_ptrs, mask=inside, other=0.0)
    tl.store(out_ptrs, total, mask=inside)


def may_read_past(tensor: Tensor, width: int) -> bool:
    """Whether every row can be read `width` elements wide without leaving the tensor's memory."""
    B, T, _ = tensor.shape
    last = tensor.storage_offset() + (B - 1) * tensor.stride(0) + (T - 1) * tensor.stride(1) + width
    return last * tensor.element_size() <= tensor.untyped_storage().nbytes()


def segmentation(tokens: int) -> dict[str, int]:
    """How a sample's tokens are cut: few wasted rows for short samples, long segments else."""
    if tokens > 256:
        chunk = LONG_SEGMENT if -tokens % LONG_SEGMENT < 64 else 64
        return {"segments": -(-tokens // chunk), "SEGMENT": chunk, "FULL": 1, "CHUNK": chunk,
                "TAIL": 0}  # fmt: skip
    chunk = 64
    full, rest = divmod(tokens, chunk)
    tail = max(16, triton.next_power_of_2(rest)) if rest else 0
    return {"segments": 1, "SEGMENT": tokens, "FULL": full, "CHUNK": chunk, "TAIL": tail}


def weighted_outer_sums(
    xs: Sequence[Tensor], gs: Sequence[Tensor], factors_B: Tensor, outs: Sequence[Tensor]
) -> None:
    """Add sum_b f_b g_b^T x_b of L layers of one shape into their (P, D) float32 `outs`."""
    (B, T, D), P, L = xs[0].shape, gs[0].shape[2], len(xs)
    x, g = xs[0], gs[0]
    table = address_table((xs, gs, outs), x.device)
    cut = segmentation(T)
    block_p, block_d = 128, 128
    outer_kernel[(triton.cdiv(P, block_p) * triton.cdiv(D, block_d), L)](
        table[0], table[1], table[2], factors_B, B, T, D, P,
        x.stride(0), x.stride(1), g.stride(0), g.stride(1), **cut,
        EVEN_T=T % (cut["CHUNK"] * cut["segments"]) == 0 or cut["segments"] == 1,
        EVEN_P=may_read_past(g, triton.cdiv(P, block_p) * block_p),
        EVEN_D=may_read_past(x, triton.cdiv(D, block_d) * block_d),
        BLOCK_P=block_p, BLOCK_D=block_d, ELEMENT=ELEMENT[x.dtype],
        num_warps=8, num_stages=3 if cut["FULL"] * cut["CHUNK"] + cut["TAIL"] <= 128 else 2,
    )  # fmt: skip


@triton.jit
def tile_kernel(  # type: ignore[no-untyped-def]
    x_table, g_table, out_LBN, B, T, D, P, x_batch, x_row, g_batch, g_row,
    EVEN_T: tl.constexpr, EVEN_P: tl.constexpr, EVEN_D: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr, ELEMENT: tl.constexpr,
):  # fmt: skip
    """Squared norm of one tile of one sample's g^T x in one layer."""
    tile, sample, layer = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    tiles_d = tl.cdiv(D, BLOCK_D)
    p = (tile // tiles_d) * BLOCK_P + tl.arange(0, BLOCK_P)
    d = (tile % tiles_d) * BLOCK_D + tl.arange(0, BLOCK_D)
    x = tile_at(x_table, layer, ELEMENT) + sample * x_batch
    g = tile_at(g_table, layer, ELEMENT) + sample * g_batch
    acc = tl.zeros((BLOCK_P, BLOCK_D), dtype=tl.float32)
    for first in range(0, T, CHUNK):
        t = first + tl.arange(0, CHUNK)
        acc = outer_chunk(g, x, g_row, x_row, t, p, d, T, P, D, acc, EVEN_T, EVEN_P, EVEN_D)
    acc = tl.where((p < P)[:, None] & (d < D)[None, :], acc, 0.0)
    at = (layer * B + sample) * tl.num_programs(0) + tile
    tl.store(out_LBN + at, tl.sum(acc * acc))


def tile_sq_norms(xs: Sequence[Tensor], gs: Sequence[Tensor], bias: bool) -> Tensor:
    """`plain.tile_sq_norms` of L layers of one shape, (L, B)."""
    (B, T, D), P, L = xs[0].shape, gs[0].shape[2], len(xs)
    x, g = xs[0], gs[0]
    block_p, block_d = 128, 128
    tiles = triton.cdiv(P, block_p) * triton.cdiv(D, block_d)
    table = address_table((xs, gs), x.device)
    out = torch.empty(L, B, tiles, dtype=torch.float32, device=x.device)
    tile_kernel[(tiles, B, L)](
        table[0], table[1], out, B, T, D, P, x.stride(0), x.stride(1), g.stride(0), g.stride(1),
        EVEN_T=T % 64 == 0, EVEN_P=may_read_past(g, triton.cdiv(P, block_p) * block_p),
        EVEN_D=may_read_past(x, triton.cdiv(D, block_d) * block_d), CHUNK=64,
        BLOCK_P=block_p, BLOCK_D=block_d, ELEMENT=ELEMENT[x.dtype], num_warps=8, num_stages=4,
    )  # fmt: skip
    squares_LB = out.sum(2).mul_(plain.tensor_core_slack(T, T))
    if bias:
        squares_LB += torch.stack([g.sum(1, dtype=torch.float32).square().sum(1) for g in gs])
    return squares_LB


@triton.jit
def row_sum_kernel(  # type: ignore[no-untyped-def]
    g_table, out_table, factors_B, B, T, P, g_batch, g_row,
    BLOCK_T: tl.constexpr, BLOCK_P: tl.constexpr, ELEMENT: tl.constexpr,
):  # fmt: skip
    """One block of one layer's sum_b f_b sum_t g_bt, added to what the output holds."""
    layer = tl.program_id(1)
    p = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    g = tile_at(g_table, layer, ELEMENT)
    total = tl.zeros((BLOCK_T, BLOCK_P), dtype=tl.float32)
    segments = tl.cdiv(T, BLOCK_T)
    for step in range(B * segments):
        sample = (step // segments).to(tl.int64)
        t = (step % segments) * BLOCK_T + tl.arange(0, BLOCK_T)
        factor = tl.load(factors_B + sample)
        inside = (t < T)[:, None] & (p < P)[None, :]
        tile = tl.load(
            g + sample * g_batch + t[:, None] * g_row + p[None, :], mask=inside, other=0.0
        )
        total += tl.where(factor == 0.0, 0.0, factor * tile.to(tl.float32))
    out = tl.load(out_table + layer).to(tl.pointer_type(tl.float32)) + p
    tl.store(out, tl.load(out, mask=p < P, other=0.0) + tl.sum(total, 0), mask=p < P)


def weighted_row_sums(gs: Sequence[Tensor], factors_B: Tensor, outs: Sequence[Tensor]) -> None:
    """Add sum_b f_b sum_t g_bt of L layers of one shape into their (P,) float32 `outs`."""
    (B, T, P), g = gs[0].shape, gs[0]
    table = address_table((gs, outs), g.device)
    row_sum_kernel[(triton.cdiv(P, 64), len(gs))](
        table[0], table[1], factors_B, B, T, P, g.stride(0), g.stride(1),
        BLOCK_T=64, BLOCK_P=64, ELEMENT=ELEMENT[g.dtype], num_warps=4, num_stages=4,
    )  # fmt: skip
