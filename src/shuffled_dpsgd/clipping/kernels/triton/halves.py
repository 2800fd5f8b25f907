"""Float32 numbers as sums of two float16 numbers each, which tensor cores multiply.

Shapes: L tensors of one shape, B samples, T tokens, D features, W features with the zeros after
them, N pieces that a sample is looked through in.

A sample of a tensor is scaled by a power of two, so that its largest number lies between 2^14 and
2^15. The high half is the scaled number rounded to float16, the low half is the rest, rounded too.
What both leave out is at most 2^-22 of the number, or 2^-39 of the sample's largest: as much as
float32 itself leaves out, but for two bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from shuffled_dpsgd.clipping.kernels.triton.addresses import address_table
from shuffled_dpsgd.clipping.kernels.triton.linear import ELEMENT

# Rows end with zeros up to a multiple of what the kernels read at a time.
STEP = 64
# Tokens and features that a program reads at a time and in all, and its warps.
BLOCK_T, BLOCK_D, FEATURES, NUM_WARPS = 16, 128, 1024, 4
# A float32 number's exponent is stored plus 127. The largest of a sample becomes 2^14 or more.
_BIAS, _TARGET = 127, 14
# No scale is larger, so that its inverse is still an ordinary number.
MAX_EXPONENT = 126


@dataclass(frozen=True, kw_only=True)
class Halves:
    """L tensors of one shape, cut in two; one half's tokens come after the other's.

    `inverse_LB` undoes the scale of a sample.
    """

    stack_LB2TW: Tensor
    inverse_LB: Tensor
    width: int
    low_first: bool

    def both(self) -> list[Tensor]:
        """Every tensor's halves as samples of twice as many tokens, (B, 2T, D)."""
        return [*self.stack_LB2TW.flatten(2, 3)[..., : self.width].unbind()]

    def high(self) -> list[Tensor]:
        """The high halves, (B, T, D)."""
        return [*self.stack_LB2TW[:, :, int(self.low_first), :, : self.width].unbind()]

    @property
    def nbytes(self) -> int:
        return self.stack_LB2TW.nbytes


@triton.jit(do_not_specialize=["B", "T"])
def largest_kernel(  # type: ignore[no-untyped-def]
    table, out_LBN, B, T, D, batch, row, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
    FEATURES: tl.constexpr, ELEMENT: tl.constexpr,
):  # fmt: skip
    """The largest absolute value in some tokens and features of one sample of one tensor."""
    piece, sample, layer = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    pieces_d = tl.cdiv(D, FEATURES)
    t = (piece // pieces_d) * BLOCK_T + tl.arange(0, BLOCK_T)
    first = (piece % pieces_d) * FEATURES
    base = tl.load(table + layer).to(tl.pointer_type(ELEMENT)) + sample * batch
    rows = base + t.to(tl.int64)[:, None] * row
    largest = tl.zeros((BLOCK_T, BLOCK_D), dtype=tl.float32)
    for start in range(0, tl.minimum(FEATURES, D - first), BLOCK_D):
        d = first + start + tl.arange(0, BLOCK_D)
        inside = (t < T)[:, None] & (d < D)[None, :]
        sizes = tl.abs(tl.load(rows + d[None, :], mask=inside, other=0.0))
        # A NaN has no size; it stays one whatever the scale.
        largest = tl.maximum(largest, tl.where(sizes == sizes, sizes, 0.0))
    at = (layer * B + sample) * tl.num_programs(0) + piece
    tl.store(out_LBN + at, tl.max(tl.max(largest, 1), 0))


@triton.jit(do_not_specialize=["B", "T"])
def split_kernel(  # type: ignore[no-untyped-def]
    table, scale_LB, out_LB2TW, B, T, D, W, batch, row, LOW_FIRST: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, FEATURES: tl.constexpr, ELEMENT: tl.constexpr,
):  # fmt: skip
    """Both halves of some tokens and features of one sample of one tensor, and zeros up to W."""
    piece, sample, layer = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    pieces_d = tl.cdiv(W, FEATURES)
    t = (piece // pieces_d) * BLOCK_T + tl.arange(0, BLOCK_T)
    first = (piece % pieces_d) * FEATURES
    base = tl.load(table + layer).to(tl.pointer_type(ELEMENT)) + sample * batch
    rows = base + t.to(tl.int64)[:, None] * row
    scale = tl.load(scale_LB + layer * B + sample)
    whole = T.to(tl.int64) * W
    out = out_LB2TW + (layer * B + sample) * 2 * whole + t.to(tl.int64)[:, None] * W
    high_out = out + whole if LOW_FIRST else out
    low_out = out if LOW_FIRST else out + whole
    for start in range(0, tl.minimum(FEATURES, W - first), BLOCK_D):
        d = first + start + tl.arange(0, BLOCK_D)
        inside = (t < T)[:, None] & (d < D)[None, :]
        scaled = tl.load(rows + d[None, :], mask=inside, other=0.0) * scale
        high = scaled.to(tl.float16)
        low = (scaled - high.to(tl.float32)).to(tl.float16)
        written = (t < T)[:, None] & (d < W)[None, :]
        tl.store(high_out + d[None, :], high, mask=written)
        tl.store(low_out + d[None, :], low, mask=written)


def scales(largest: Tensor, max_exponent: int) -> tuple[Tensor, Tensor]:
    """Powers of two, at most 2^max_exponent, by which samples are scaled, and their inverses.

    Infinite and NaN samples stay what they are.
    """
    stored = largest.contiguous().view(torch.int32) >> 23
    wanted = (2 * _BIAS + _TARGET - stored).clamp(max=_BIAS + max_exponent)
    return (wanted << 23).view(torch.float32), ((2 * _BIAS - wanted) << 23).view(torch.float32)


def split(
    tensors: Sequence[Tensor], *, low_first: bool, max_exponent: int = MAX_EXPONENT
) -> Halves:
    """The halves of float32 tensors of one shape and stride, whose features lie side by side."""
    (B, T, D), L, of = tensors[0].shape, len(tensors), tensors[0]
    W = triton.cdiv(D, STEP) * STEP
    table = address_table((tensors,), of.device)[0]
    options = {
        "BLOCK_T": BLOCK_T, "BLOCK_D": BLOCK_D, "FEATURES": FEATURES,
        "ELEMENT": ELEMENT[of.dtype], "num_warps": NUM_WARPS,
    }  # fmt: skip
    slices = triton.cdiv(T, BLOCK_T)
    pieces = slices * triton.cdiv(D, FEATURES)
    largest = torch.empty(L, B, pieces, dtype=torch.float32, device=of.device)
    strides = (of.stride(0), of.stride(1))
    largest_kernel[(pieces, B, L)](table, largest, B, T, D, *strides, **options)
    scale_LB, inverse_LB = scales(largest.amax(2), max_exponent)
    stack = torch.empty(L, B, 2, T, W, dtype=torch.float16, device=of.device)
    split_kernel[(slices * triton.cdiv(W, FEATURES), B, L)](
        table, scale_LB, stack, B, T, D, W, *strides, LOW_FIRST=low_first, **options
    )
    return Halves(stack_LB2TW=stack, inverse_LB=inverse_LB, width=D, low_first=low_first)
