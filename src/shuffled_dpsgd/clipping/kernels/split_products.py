"""Float32 linear maps on tensor cores: norms and sums from products of float16 halves.

Shapes as in `plain`; L is a number of layers.

TF32 would round every operand to eleven bits, and a sample could then contribute a thousandth more
than the clip norm. Here every float32 number becomes the sum of two float16 numbers, and a product
of two becomes three products, which keeps 22 bits (`triton.halves`). That is two bits less than
float32 has, and several times faster. It serves where the user lets the model's own products run
in TF32, which are far less exact. Without that, everything is computed in plain float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shuffled_dpsgd.clipping.kernels import choices
from shuffled_dpsgd.clipping.kernels.alignment import MIN_WIDTH

if TYPE_CHECKING:
    from shuffled_dpsgd.clipping.kernels.triton.halves import Halves

Pair = tuple[Tensor, Tensor]
# A shorter sample does not fill blocks of 16 tokens well enough.
MIN_TOKENS = 8
# Halves take as much memory as what they are of. So many bytes of them are made at a time, and so
# many are kept from the norms of a batch to its sums; more are made again.
PIECE_BYTES, KEPT_BYTES = 1 << 30, 1 << 32
# With a bias, the square of the inputs' scale must be an ordinary number.
MAX_EXPONENT_WITH_BIAS = 40


class KeptHalves:
    """Halves by the pairs they are of, as many as may be kept.

    Inputs that several layers read are split for each of them: their products may run side by
    side, and none must read what another still writes.
    """

    def __init__(self) -> None:
        self._found: dict[tuple[object, ...], tuple[Sequence[Pair], Halves, Halves]] = {}
        self._nbytes = 0

    def of(self, pairs: Sequence[Pair], bias: bool) -> tuple[Halves, Halves]:
        """The halves of inputs and of gradients."""
        key = (bias, *(id(tensor) for pair in pairs for tensor in pair))
        if key in self._found:
            return self._found[key][1:]
        by = choices.module("triton.halves")
        xs, gs = zip(*pairs, strict=True)
        x_exponent = MAX_EXPONENT_WITH_BIAS if bias else by.MAX_EXPONENT
        x: Halves = by.split(xs, low_first=True, max_exponent=x_exponent)
        g: Halves = by.split(gs, low_first=False)
        if self._nbytes + x.nbytes + g.nbytes <= KEPT_BYTES:
            # The tensors are kept as well, so that no other gets their ids.
            self._found[key] = (pairs, x, g)
            self._nbytes += x.nbytes + g.nbytes
        return x, g


_KEPT: ContextVar[KeptHalves | None] = ContextVar("_KEPT", default=None)


@contextmanager
def keeping_halves() -> Iterator[None]:
    """Keep halves inside, so that sums need not make again what norms have made."""
    token = _KEPT.set(KeptHalves())
    try:
        yield
    finally:
        _KEPT.reset(token)


def serves(x_BTD: Tensor, g_BTP: Tensor) -> bool:
    """Whether products of these are served: float32 on a GPU, where TF32 is allowed."""
    B, T, D = x_BTD.shape
    return (
        x_BTD.is_cuda
        and x_BTD.dtype is g_BTP.dtype is torch.float32
        and B > 0
        and T >= MIN_TOKENS
        and min(D, g_BTP.shape[2]) >= MIN_WIDTH
        and x_BTD.stride(2) == g_BTP.stride(2) == 1
        and choices.splits_float32(x_BTD.device)
    )


def gram_sq_norms(pairs: Sequence[Pair], bias: bool) -> list[Tensor]:
    """(B,) squared norms of layers of one shape, as `plain.gram_sq_norms` finds them.

    They leave room for what `add_outer_sums` loses.
    """
    by = choices.module("triton.split_gram")
    found: list[Tensor] = []
    for piece in _pieces(pairs):
        x, g = (_KEPT.get() or KeptHalves()).of(piece, bias)
        found += by.gram_sq_norms(x, g, bias).unbind()
    return found


def add_outer_sums(
    pairs: Sequence[Pair],
    factors_B: Tensor,
    outs: Sequence[Tensor],
    accumulate: bool,
    bias: bool = False,
) -> None:
    """Add each pair's sum_b f_b g_b^T x_b into its (P, D) float32 `out`, or write it there.

    `bias` says whether the norms were asked for with a bias, which decides the halves' scale.
    """
    done = 0
    for piece in _pieces(pairs):
        x, g = (_KEPT.get() or KeptHalves()).of(piece, bias)
        factors_LB = factors_B.double() * x.inverse_LB.double() * g.inverse_LB.double()
        targets = outs[done : done + len(piece)]
        done += len(piece)
        # <l, h> and <h, l> in one go: the inputs' low halves come first, the gradients' last.
        _multiply(x.both(), g.both(), factors_LB.float(), targets, accumulate)
        _multiply(x.high(), g.high(), factors_LB.float(), targets, True)


def _multiply(
    xs: Sequence[Tensor],
    gs: Sequence[Tensor],
    factors_LB: Tensor,
    outs: Sequence[Tensor],
    add: bool,
) -> None:
    """One product of halves, by the kernels for half precision."""
    name = choices.outer_sums(xs[0].device, xs[0].shape[1]) or "triton.sums"
    if name == "triton.sums" and not outs[0].is_contiguous():
        # The transpose of a sum is the sum of the pair the other way round.
        xs, gs, outs = gs, xs, [out.mT for out in outs]
    choices.module(name).weighted_outer_sums(xs, gs, factors_LB, outs, add)


def _pieces(pairs: Sequence[Pair]) -> Iterator[Sequence[Pair]]:
    """As many layers at a time as `PIECE_BYTES` allow, at least one."""
    x, g = pairs[0]
    number = max(1, PIECE_BYTES // (x.nbytes + g.nbytes))
    for first in range(0, len(pairs), number):
        yield pairs[first : first + number]
