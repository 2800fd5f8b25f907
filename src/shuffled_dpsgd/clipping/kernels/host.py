"""The primitives that have a faster form on a CPU, for single and half precision.

Results and shapes are those of `plain`. Three things make them faster: products in float64 are
limited to the narrow side of a layer, factors multiply the smaller operand, and temporaries stay
within the caches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shuffled_dpsgd.clipping.kernels import plain

# Elements of a temporary that is small enough to be read back from the cache, and its columns:
# blocks of other widths are multiplied more slowly than what the cache saves.
CACHED_ELEMENTS, COLUMNS = 1 << 20, 256
# At most this many float32 squares are added up in float32; longer sums round too much.
NORM_BLOCK = 2048
# Products with a triangle of fewer rows than these are not cut in two: they are too small for it.
FEWEST_HALVED = 128
# Below every product of two float32 numbers, and representable.
_TINY = 1e-200


def serves(*tensors: Tensor) -> bool:
    """Whether these are on the CPU, not empty, and not in double precision."""
    return all(
        tensor.device.type == "cpu" and tensor.dtype is not torch.float64 and tensor.numel() > 0
        for tensor in tensors
    )


def name_for(*tensors: Tensor) -> str:
    """The module that serves these where no GPU kernel does."""
    return "host" if serves(*tensors) else "plain"


def row_sq_norms(rows_BN: Tensor) -> Tensor:
    """(B,) squared lengths in float64, of float32 rows."""
    B, N = rows_BN.shape
    rest = N % NORM_BLOCK
    blocks_BKN = rows_BN[:, : N - rest].reshape(B, -1, NORM_BLOCK)
    squares_B = torch.linalg.vector_norm(blocks_BKN, dim=2).double().square_().sum(1)
    if rest:
        squares_B += torch.linalg.vector_norm(rows_BN[:, N - rest :], dim=1).double().square_()
    return squares_B


class Factors(NamedTuple):
    """L with L L^T = X X^T for the tokens of every sample of F inputs, in float64.

    `lengths_FBT` are the lengths of the tokens.
    """

    lower_FBTT: Tensor
    lengths_FBT: Tensor


def gram_sq_norms(pairs: Sequence[tuple[Tensor, Tensor]], bias: bool) -> list[Tensor]:
    """`plain.gram_sq_norms` of layers of one shape, with one Gram matrix each instead of two.

    Let X X^T = L L^T (Cholesky, float64) on the narrower side. Then ||G^T X|| = ||G^T L||, and
    token t's row of L is as long as x_t, so that rounding the product G^T L to float32 costs a
    norm no more than rounding G^T X itself would: an error relative to sum_t |x_t| |g_t|, which
    the head room of `plain.not_too_small` covers. (Rounding both Gram matrices to float32 would
    cost the *square* as much relative to the square of that sum.)

    Layers with the same input (queries, keys and values) share its factor. Small layers are taken
    several at a time, because asking for an operation takes longer than many of them.
    """
    x_BTD, g_BTP = pairs[0]
    inputs_narrow = x_BTD.shape[2] <= g_BTP.shape[2]
    sides = [(x, g) if inputs_narrow else (g, x) for x, g in pairs]
    B, T, D = sides[0][0].shape
    # A factor saves nothing for one token, or for more tokens than features.
    if T == 1 or D < T:
        return [plain.gram_sq_norms(x, g, bias) for x, g in pairs]
    layers_of: dict[int, list[int]] = {}
    for layer, (narrow, _) in enumerate(sides):
        layers_of.setdefault(id(narrow), []).append(layer)
    sharing = list(layers_of.values())
    found: dict[int, Tensor] = {}
    at_once = max(1, CACHED_ELEMENTS // (B * T * T))
    for first in range(0, len(sharing), at_once):
        some = sharing[first : first + at_once]
        layers = [layer for each in some for layer in each]
        factors = _factors([sides[each[0]][0] for each in some], bias and inputs_narrow)
        if factors is None:
            found |= {layer: plain.gram_sq_norms(*pairs[layer], bias) for layer in layers}
            continue
        places = [place for place, each in enumerate(some) for _ in each]
        wides = [sides[layer][1] for layer in layers]
        squares_LB = _factored_sq_norms(factors, places, wides, bias and not inputs_narrow)
        found |= zip(layers, squares_LB.unbind(), strict=True)
    return [found[layer] for layer in range(len(pairs))]


def _factors(inputs: Sequence[Tensor], with_one: bool) -> Factors | None:
    """The factors of the tokens' Gram matrices, each token with a one at its end if asked.

    Repeated tokens make such a matrix singular; its diagonal is therefore enlarged by what the
    rounding of the matrix and of its factor can amount to (Demmel 1989), about 1e-11 of it. That
    errs upwards. None where some tokens are not finite, which `plain` handles.
    """
    _, T, D = inputs[0].shape
    gram_FBTT = torch.stack([plain.exact_inner_products(x_BTD, x_BTD) for x_BTD in inputs])
    if with_one:
        gram_FBTT += 1.0
    diagonal_FBT = gram_FBTT.diagonal(dim1=2, dim2=3)
    lengths_FBT = diagonal_FBT.sqrt()
    diagonal_FBT.mul_(1.0 + T * (T + D + 4) * 2.0**-52).clamp_(min=_TINY)
    lower_FBTT, failed_FB = torch.linalg.cholesky_ex(gram_FBTT)
    return None if bool(failed_FB.any()) else Factors(lower_FBTT, lengths_FBT)


def _factored_sq_norms(
    factors: Factors, places: Sequence[int], wides: Sequence[Tensor], with_one: bool
) -> Tensor:
    """(L, B) squared norms of layers whose narrow sides have the factors at `places`."""
    wides = [wide_BTC.float() for wide_BTC in wides]
    uppers = factors.lower_FBTT.float().mT.unbind()
    squares_LB = torch.stack(
        [
            _triangular_sq_norms(uppers[place], wide)
            for place, wide in zip(places, wides, strict=True)
        ]
    )
    lengths_LBT = torch.stack([torch.linalg.vector_norm(wide, dim=2) for wide in wides]).double()
    if with_one:
        squares_LB += factors.lower_FBTT.sum(2).square_().sum(2)[places]
        lengths_LBT = (lengths_LBT.square_() + 1.0).sqrt_()
    reach_LB = lengths_LBT.mul_(factors.lengths_FBT[places]).sum(2)
    return plain.not_too_small(squares_LB, reach_LB, torch.float32)


def tile_sq_norms(x_BTD: Tensor, g_BTP: Tensor, bias: bool) -> Tensor:
    """`plain.tile_sq_norms` with tiles that fit the caches."""
    x_BTD, g_BTP = x_BTD.float(), g_BTP.float()
    narrow, wide = (x_BTD, g_BTP) if x_BTD.shape[2] <= g_BTP.shape[2] else (g_BTP, x_BTD)
    squares_B = _product_sq_norms(narrow.mT, wide)
    if bias:
        squares_B += row_sq_norms(g_BTP.sum(1))
    return plain.not_too_small(squares_B, plain.reach(x_BTD, g_BTP, bias), torch.float32)


def _triangular_sq_norms(upper_BTT: Tensor, right_BTC: Tensor) -> Tensor:
    """(B,) squared norms of upper @ right, float64, without half of the zeros it would add up."""
    T = upper_BTT.shape[1]
    if T < FEWEST_HALVED:
        return _product_sq_norms(upper_BTT, right_BTC)
    half = T // 2
    above_B = _product_sq_norms(upper_BTT[:, :half], right_BTC)
    return above_B + _product_sq_norms(upper_BTT[:, half:, half:], right_BTC[:, half:])


def _product_sq_norms(left_BST: Tensor, right_BTC: Tensor) -> Tensor:
    """(B,) squared norms of left @ right, float64, a cached block of columns at a time."""
    B, S, _ = left_BST.shape
    step = max(1, CACHED_ELEMENTS // (B * S * COLUMNS)) * COLUMNS
    parts = [
        row_sq_norms(torch.bmm(left_BST, columns_BTK).flatten(1))
        for columns_BTK in right_BTC.split(step, 2)
    ]
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)


def weighted_outer_sum(
    x_BTD: Tensor, g_BTP: Tensor, factors_B: Tensor, out_PD: Tensor, accumulate: bool = True
) -> Tensor:
    """`plain.weighted_outer_sum` with the factors on the smaller operand.

    Unless `accumulate`, what `out_PD` holds is overwritten.
    """
    if plain.may_hold_zeros(factors_B):
        start_PD = out_PD if accumulate else out_PD.zero_()
        return plain.weighted_outer_sum(x_BTD, g_BTP, factors_B, start_PD)
    x_BTD, g_BTP = plain.widen(x_BTD), plain.widen(g_BTP)
    factors_B11 = factors_B.to(x_BTD.dtype)[:, None, None]
    if x_BTD.shape[2] <= g_BTP.shape[2]:
        x_BTD = x_BTD * factors_B11
    else:
        g_BTP = g_BTP * factors_B11
    left, right = g_BTP.flatten(0, 1).mT, x_BTD.flatten(0, 1)
    return out_PD.addmm_(left, right) if accumulate else torch.mm(left, right, out=out_PD)
