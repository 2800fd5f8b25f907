"""Norms and sums of embedding tables, also of those tied to a head, on a GPU in a few launches.

Shapes: B samples, T and S tokens, D features, V rows of the table, F blocks of features, N programs
of a sample. Plain torch takes some twenty operations for this, each of which reads and writes whole
gradients; here they are read once. Norms are added up in a fixed order, those of rows in float64.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from shuffled_dpsgd.clipping.kernels import plain

# Features of a block; ids compared at a time to count those that are the same (ALL, usually all of
# a sample) and to find them (LOOK); and rows of the table's gradient read at a time.
FEATURES, ALL, LOOK, ROWS = 512, 1024, 128, 8
# Tokens picked at a time of either side, and the tile of a tied table's products.
PICK_T, PICK_S = 32, 128
BLOCK_S, BLOCK_D, CHUNK = 128, 128, 64


def side_by_side(tensor_BTD: Tensor) -> Tensor:
    """The tensor, copied if the features of a token do not lie side by side."""
    return tensor_BTD if tensor_BTD.stride(2) == 1 else tensor_BTD.contiguous()


@triton.jit(do_not_specialize=["T", "padding_idx", "ids_batch"])
def row_kernel(  # type: ignore[no-untyped-def]
    ids_BT, g_BTD, out_BTF2, T, D, padding_idx, ids_batch, ids_row, g_batch, g_row,
    PADDING: tl.constexpr, FEATURES: tl.constexpr, ALL: tl.constexpr, LOOK: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Some features of a token's gradient: their square, and that of the row the token picks.

    The first token that picks a row adds up all of them; for the others the row counts nothing.
    """
    t, sample, part = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    ids = ids_BT + sample * ids_batch
    g = g_BTD + sample * g_batch
    d = part * FEATURES + tl.arange(0, FEATURES)
    mine = tl.load(ids + t * ids_row)
    total = tl.load(g + t.to(tl.int64) * g_row + d, mask=d < D, other=0.0).to(tl.float64)
    if PADDING:
        total = tl.where(mine == padding_idx, 0.0, total)
    out = out_BTF2 + 2 * ((sample * tl.num_programs(0) + t) * tl.num_programs(2) + part)
    tl.store(out + 1, tl.sum(total * total))
    earlier, later = 0, 0
    for first in range(0, T, ALL):
        s = first + tl.arange(0, ALL)
        same = (tl.load(ids + s * ids_row, mask=s < T, other=0) == mine) & (s < T)
        earlier += tl.sum((same & (s < t)).to(tl.int32))
        later += tl.sum((same & (s > t)).to(tl.int32))
    if earlier > 0:
        tl.store(out, 0.0)
        return
    end = tl.where(later > 0, T, 0)
    if PADDING:
        end = tl.where(mine == padding_idx, 0, end)
    look = tl.arange(0, LOOK)
    for first in range(t // LOOK * LOOK, end, LOOK):
        s = first + look
        same = (tl.load(ids + s * ids_row, mask=s < T, other=0) == mine) & (s < T) & (s > t)
        if tl.sum(same.to(tl.int32)) > 0:
            for at in range(first, first + LOOK, ROWS):
                r = at + tl.arange(0, ROWS)
                same_r = (tl.load(ids + r * ids_row, mask=r < T, other=0) == mine) & (r < T)
                inside = (same_r & (r > t))[:, None] & (d < D)[None, :]
                ptrs = g + r.to(tl.int64)[:, None] * g_row + d[None, :]
                total += tl.sum(tl.load(ptrs, mask=inside, other=0.0).to(tl.float64), 0)
    tl.store(out, tl.sum(total * total))


def embedding_sq_norms(ids_BT: Tensor, g_BTD: Tensor, padding_idx: int | None) -> Tensor:
    """`plain.embedding_sq_norms` of float32 gradients."""
    (B, T), D = ids_BT.shape, g_BTD.shape[2]
    g_BTD = side_by_side(g_BTD)
    features = min(FEATURES, triton.next_power_of_2(D))
    parts = triton.cdiv(D, features)
    out = torch.empty(B, T, parts, 2, dtype=torch.float64, device=g_BTD.device)
    row_kernel[(T, B, parts)](
        ids_BT, g_BTD, out, T, D, -1 if padding_idx is None else padding_idx,
        ids_BT.stride(0), ids_BT.stride(1), g_BTD.stride(0), g_BTD.stride(1),
        PADDING=padding_idx is not None, FEATURES=features,
        ALL=min(ALL, triton.next_power_of_2(T)), LOOK=LOOK, ROWS=ROWS, num_warps=4,
    )  # fmt: skip
    rows_BT, own_BT = out.sum(2).unbind(2)
    return plain.not_too_small(rows_BT.sum(1), own_BT.sqrt().sum(1), torch.float32)


@triton.jit(do_not_specialize=["padding_idx", "ids_batch"])
def add_rows_kernel(  # type: ignore[no-untyped-def]
    ids_BT, g_BTD, factors_B, out_VD, D, padding_idx, ids_batch, ids_row, g_batch, g_row,
    PADDING: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    """Add some features of a token's gradient, times its sample's factor, to the row it picks."""
    t, sample = tl.program_id(0), tl.program_id(1).to(tl.int64)
    d = tl.program_id(2) * FEATURES + tl.arange(0, FEATURES)
    row = tl.load(ids_BT + sample * ids_batch + t * ids_row)
    factor = tl.load(factors_B + sample)
    # A factor of zero must silence infinities and NaNs too.
    counts = factor != 0.0
    if PADDING:
        counts = counts & (row != padding_idx)
    if counts:
        g = g_BTD + sample * g_batch + t.to(tl.int64) * g_row + d
        values = factor * tl.load(g, mask=d < D, other=0.0).to(tl.float32)
        tl.atomic_add(out_VD + row.to(tl.int64) * D + d, values, mask=d < D, sem="relaxed")


def weighted_embedding_sum(
    ids_BT: Tensor, g_BTD: Tensor, factors_B: Tensor, padding_idx: int | None, out_VD: Tensor
) -> None:
    """`plain.weighted_embedding_sum` into float32, in one pass and in any order."""
    (B, T), D = ids_BT.shape, g_BTD.shape[2]
    g_BTD = side_by_side(g_BTD)
    features = min(FEATURES, triton.next_power_of_2(D))
    add_rows_kernel[(T, B, triton.cdiv(D, features))](
        ids_BT, g_BTD, factors_B, out_VD, D, -1 if padding_idx is None else padding_idx,
        ids_BT.stride(0), ids_BT.stride(1), g_BTD.stride(0), g_BTD.stride(1),
        PADDING=padding_idx is not None, FEATURES=features, num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["padding_idx", "ids_batch"])
def read_kernel(  # type: ignore[no-untyped-def]
    head_BVD, ids_BS, ge_BSD, out_BN, D, padding_idx, head_batch, ids_batch, ids_row, ge_batch,
    ge_row, PADDING: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    """<head[id_s], ge_s> over some features of one token s."""
    s, sample, part = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    d = part * FEATURES + tl.arange(0, FEATURES)
    row = tl.load(ids_BS + sample * ids_batch + s * ids_row)
    at = head_BVD + sample * head_batch + row.to(tl.int64) * D + d
    head = tl.load(at, mask=d < D, other=0.0).to(tl.float64)
    at = ge_BSD + sample * ge_batch + s.to(tl.int64) * ge_row + d
    total = tl.sum(head * tl.load(at, mask=d < D, other=0.0).to(tl.float64))
    if PADDING:
        total = tl.where(row == padding_idx, 0.0, total)
    out = out_BN + (sample * tl.num_programs(0) + s) * tl.num_programs(2) + part
    tl.store(out, total)


def stored_cross_terms(
    head_BVD: Tensor, ids_BS: Tensor, ge_BSD: Tensor, padding_idx: int | None
) -> Tensor:
    """`plain.stored_cross_terms` of a contiguous head, float32 or half precision."""
    (B, S), D = ids_BS.shape, head_BVD.shape[2]
    ge_BSD = side_by_side(ge_BSD)
    features = min(FEATURES, triton.next_power_of_2(D))
    parts = triton.cdiv(D, features)
    out = torch.empty(B, S * parts, dtype=torch.float64, device=head_BVD.device)
    read_kernel[(S, B, parts)](
        head_BVD, ids_BS, ge_BSD, out, D, -1 if padding_idx is None else padding_idx,
        head_BVD.stride(0), ids_BS.stride(0), ids_BS.stride(1), ge_BSD.stride(0), ge_BSD.stride(1),
        PADDING=padding_idx is not None, FEATURES=features, num_warps=4,
    )  # fmt: skip
    return out.sum(1)


@triton.jit(do_not_specialize=["T", "ids_batch"])
def pick_kernel(  # type: ignore[no-untyped-def]
    gl_BTV, ids_BS, x_BT, ge_BS, picked_BTS, out_BN, T, S, gl_batch, gl_row, ids_batch, ids_row,
    PICK_T: tl.constexpr, PICK_S: tl.constexpr,
):  # fmt: skip
    """gl_t[id_s] for some tokens t and s, and the sum of |gl_t[id_s]| |x_t| |ge_s|."""
    block, sample = tl.program_id(0), tl.program_id(1).to(tl.int64)
    blocks_s = tl.cdiv(S, PICK_S)
    t = (block // blocks_s).to(tl.int64) * PICK_T + tl.arange(0, PICK_T)
    s = block % blocks_s * PICK_S + tl.arange(0, PICK_S)
    ids = tl.load(ids_BS + sample * ids_batch + s * ids_row, mask=s < S, other=0)
    inside = (t < T)[:, None] & (s < S)[None, :]
    ptrs = gl_BTV + sample * gl_batch + t[:, None] * gl_row + ids[None, :]
    picked = tl.load(ptrs, mask=inside, other=0.0)
    tl.store(picked_BTS + (sample * T + t[:, None]) * S + s[None, :], picked, mask=inside)
    x_lengths = tl.load(x_BT + sample * T + t, mask=t < T, other=0.0)
    ge_lengths = tl.load(ge_BS + sample * S + s, mask=s < S, other=0.0)
    by_s = tl.sum(tl.abs(picked.to(tl.float32)) * x_lengths[:, None], 0)
    tl.store(out_BN + sample * tl.num_programs(0) + block, tl.sum(by_s * ge_lengths))


@triton.jit
def tie_kernel(  # type: ignore[no-untyped-def]
    picked_BTS, x_BTD, ge_BSD, out_BN, T, S, D, x_batch, x_row, ge_batch, ge_row,
    EVEN_S: tl.constexpr, EVEN_D: tl.constexpr, EVEN_T: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """sum_s <ge_s, sum_t picked_ts x_t> over some tokens s and features of one sample."""
    block, sample = tl.program_id(0), tl.program_id(1).to(tl.int64)
    blocks_d = tl.cdiv(D, BLOCK_D)
    s = block // blocks_d * BLOCK_S + tl.arange(0, BLOCK_S)
    d = block % blocks_d * BLOCK_D + tl.arange(0, BLOCK_D)
    acc = tl.zeros((BLOCK_S, BLOCK_D), dtype=tl.float32)
    for first in range(0, T, CHUNK):
        t = first + tl.arange(0, CHUNK)
        p_ptrs = picked_BTS + (sample * T + t[:, None]) * S + s[None, :]
        x_ptrs = x_BTD + sample * x_batch + t.to(tl.int64)[:, None] * x_row + d[None, :]
        if EVEN_T and EVEN_S:
            p = tl.load(p_ptrs)
        else:
            p = tl.load(p_ptrs, mask=(t < T)[:, None] & (s < S)[None, :], other=0.0)
        if EVEN_T and EVEN_D:
            x = tl.load(x_ptrs)
        else:
            x = tl.load(x_ptrs, mask=(t < T)[:, None] & (d < D)[None, :], other=0.0)
        acc = tl.dot(tl.trans(p), x, acc)
    inside = (s < S)[:, None] & (d < D)[None, :]
    ge_ptrs = ge_BSD + sample * ge_batch + s.to(tl.int64)[:, None] * ge_row + d[None, :]
    ge = tl.load(ge_ptrs, mask=inside, other=0.0)
    products = tl.where(inside, acc.to(tl.float64) * ge.to(tl.float64), 0.0)
    tl.store(out_BN + sample * tl.num_programs(0) + block, tl.sum(products))


def tied_cross_terms(
    x_BTD: Tensor, gl_BTV: Tensor, ids_BS: Tensor, ge_BSD: Tensor, padding_idx: int | None
) -> Tensor:
    """`plain.tied_cross_terms` plus a bound on its error, for logits' gradients in x's precision.

    sum_s <ge_s, sum_t gl_t[id_s] x_t>: the inner sum is a product of two half-precision matrices.
    Cutting off loses at most T/16 units in the last place of sum_t |gl_t[id_s]| |x_t|, see
    `plain.above_cut_off`; multiplying by ge_s and changing precision, fewer than two more.
    """
    (B, T, D), S = x_BTD.shape, ids_BS.shape[1]
    if padding_idx is not None:
        ge_BSD = torch.where((ids_BS != padding_idx)[:, :, None], ge_BSD, 0.0)
    x_BT = torch.linalg.vector_norm(x_BTD, dim=2, dtype=torch.float32)
    ge_BS = torch.linalg.vector_norm(ge_BSD, dim=2, dtype=torch.float32)
    picks = triton.cdiv(T, PICK_T) * triton.cdiv(S, PICK_S)
    tiles = triton.cdiv(S, BLOCK_S) * triton.cdiv(D, BLOCK_D)
    reach = torch.empty(B, picks, dtype=torch.float32, device=x_BTD.device)
    total = torch.empty(B, tiles, dtype=torch.float64, device=x_BTD.device)
    for some in plain.slices(B, T * S):
        x, gl, ge = (side_by_side(tensor[some]) for tensor in (x_BTD, gl_BTV, ge_BSD))
        ids = ids_BS[some]
        picked = torch.empty(len(x), T, S, dtype=gl.dtype, device=gl.device)
        pick_kernel[(picks, len(x))](
            gl, ids, x_BT[some], ge_BS[some], picked, reach[some], T, S,
            gl.stride(0), gl.stride(1), ids.stride(0), ids.stride(1),
            PICK_T=PICK_T, PICK_S=PICK_S, num_warps=4,
        )  # fmt: skip
        tie_kernel[(tiles, len(x))](
            picked, x, ge, total[some], T, S, D,
            x.stride(0), x.stride(1), ge.stride(0), ge.stride(1),
            EVEN_S=S % BLOCK_S == 0, EVEN_D=D % BLOCK_D == 0, EVEN_T=T % CHUNK == 0,
            BLOCK_S=BLOCK_S, BLOCK_D=BLOCK_D, CHUNK=CHUNK, num_warps=8, num_stages=3,
        )  # fmt: skip
    cut_off = 2.0**-23 * (-(-T // 16) + 2)
    return total.sum(1).float() + cut_off * reach.sum(1)
