"""Linear maps: per-sample norms and clipped sums, by the fastest kernels that serve the tensors.

On a CUDA device Triton serves half precision, and float32 where TF32 is allowed. The forms for a
CPU, below, serve both there, and `plain` everything else. All results agree to float32 rounding.
Shapes as in `plain`; L is a number of layers.

Three things make the forms for a CPU faster than `plain`: products in float64 are limited to the
narrow side of a layer, factors multiply the smaller operand, and temporaries stay within the
caches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shuffled_dpsgd.clipping.kernels import choices, plain
from shuffled_dpsgd.clipping.kernels.choices import MIN_WIDTH, ROW_ALIGNMENT_BYTES, aligned
from shuffled_dpsgd.runtime.backends import TAKEN

# A shorter sample does not fill blocks of 16 tokens well enough.
MIN_TOKENS = 8
# Elements of a temporary that is small enough to be read back from the cache, and its columns:
# blocks of other widths are multiplied more slowly than what the cache saves.
CACHED_ELEMENTS, COLUMNS = 1 << 20, 256
# At most this many float32 squares are added up in float32; longer sums round too much.
NORM_BLOCK = 2048
# Products with a triangle of fewer rows than these are not cut in two: they are too small for it.
FEWEST_HALVED = 128
# Below every product of two float32 numbers, and representable.
_TINY = 1e-200


def fits_triton_linear(x_BTD: Tensor, g_BTP: Tensor) -> bool:
    """Whether the Triton kernels take this pair. Rows of halves must be read in wide words."""
    B, T, D = x_BTD.shape
    return (
        x_BTD.dtype == g_BTP.dtype
        and B > 0
        and T >= MIN_TOKENS
        and min(D, g_BTP.shape[2]) >= MIN_WIDTH
        and all(map(_is_readable, (x_BTD, g_BTP)))
        and choices.multiplies(x_BTD.dtype, x_BTD.device)
    )


def _is_readable(tensor: Tensor) -> bool:
    if tensor.dtype in choices.HALF:
        return aligned(tensor)
    return tensor.stride(-1) == 1 and tensor.data_ptr() % ROW_ALIGNMENT_BYTES == 0


def alike(pairs: Sequence[tuple[Tensor, Tensor]], labels: Sequence[object]) -> list[list[int]]:
    """Indices of `pairs` in runs that one launch can serve: same shapes, strides and label."""
    runs: dict[object, list[int]] = {}
    for index, ((x, g), label) in enumerate(zip(pairs, labels, strict=True)):
        key = (x.shape, g.shape, x.stride(), g.stride(), x.dtype, g.dtype, label)
        runs.setdefault(key, []).append(index)
    return list(runs.values())


def gram_sq_norm_sums(
    pairs: Sequence[tuple[Tensor, Tensor]], biases: Sequence[bool]
) -> list[Tensor]:
    """(B,) tensors that add up to the sum of all pairs' `plain.gram_sq_norms`.

    Layers of one shape share a launch.
    """
    found: list[Tensor] = []
    for run in alike(pairs, biases):
        x, g = pairs[run[0]]
        kernel = None
        if fits_triton_linear(x, g):
            kernel = choices.gram_norms(x.device, x.dtype, max(x.shape[2], g.shape[2]))
        TAKEN["norms by Gram matrices"].add(kernel or _plain_name(x, g))
        if kernel is not None:
            xs, gs = zip(*(pairs[i] for i in run), strict=True)
            found.append(choices.module(kernel).gram_sq_norms(xs, gs, biases[run[0]]).sum(0))
        elif is_on_cpu(x, g):
            found += cpu_gram_sq_norms([pairs[i] for i in run], biases[run[0]])
        else:
            found += [plain.gram_sq_norms(*pairs[i], biases[i]) for i in run]
    return found


def tile_sq_norm_sums(
    pairs: Sequence[tuple[Tensor, Tensor]], biases: Sequence[bool]
) -> list[Tensor]:
    """(B,) tensors that add up to the sum of all pairs' `plain.tile_sq_norms`.

    Layers of one shape share a launch.
    """
    found: list[Tensor] = []
    for run in alike(pairs, biases):
        x, g = pairs[run[0]]
        kernel = None
        if fits_triton_linear(x, g):
            kernel = "triton.tiles" if choices.may_take(choices.KERNELS, x.device) else None
        TAKEN["norms by tiles"].add(kernel or _plain_name(x, g))
        if kernel is not None:
            xs, gs = zip(*(pairs[i] for i in run), strict=True)
            found.append(choices.module(kernel).tile_sq_norms(xs, gs, biases[run[0]]).sum(0))
        else:
            norms = cpu_tile_sq_norms if is_on_cpu(x, g) else plain.tile_sq_norms
            found += [norms(*pairs[i], biases[i]) for i in run]
    return found


def add_weighted_outer_sums(
    pairs: Sequence[tuple[Tensor, Tensor]],
    factors_B: Tensor,
    outs: Sequence[Tensor],
    accumulate: bool = True,
    biases: Sequence[Tensor | None] | None = None,
) -> None:
    """Add each pair's sum_b f_b g_b^T x_b into its `out`, and sum_b f_b sum_t g_bt into its bias.

    An `out` is (P, D), contiguous or the transpose of what is; a bias is (P,), or None where there
    is none. Unless `accumulate`, what they hold is overwritten, which saves filling them with
    zeros.
    """
    wanted = [None] * len(pairs) if biases is None else biases
    labels = [
        (out.dtype, out.stride(), None if bias is None else bias.dtype)
        for out, bias in zip(outs, wanted, strict=True)
    ]
    for run in alike(pairs, labels):
        chosen = [pairs[i] for i in run]
        targets = [outs[i] for i in run]
        added = [bias for i in run if (bias := wanted[i]) is not None]
        x, g = chosen[0]
        kernel = None
        if fits_triton_linear(x, g):
            kernel = choices.outer_sums(x.device, x.dtype)
        if kernel is not None and not all(_fits_triton_sum(out) for out in targets):
            _add_through_copies(chosen, factors_B, targets, accumulate)
        elif kernel == "gluon.weighted_sums":
            TAKEN["weighted sums"].add(kernel)
            xs, gs = zip(*chosen, strict=True)
            by = choices.module(kernel)
            by.weighted_outer_sums(xs, gs, factors_B.float(), targets, accumulate, added)
            continue
        else:
            _add_outer_sums(chosen, factors_B, targets, accumulate, kernel)
        if added:
            plain.add_weighted_row_sums([g for _, g in chosen], factors_B, added, accumulate)


def _add_through_copies(
    pairs: Sequence[tuple[Tensor, Tensor]],
    factors_B: Tensor,
    outs: Sequence[Tensor],
    accumulate: bool,
) -> None:
    """The same sums by the same kernels, for outputs that these cannot write.

    Plain torch would not do: norms may be exact for what the kernels compute, and no more.
    """
    floats, device = torch.float32, outs[0].device
    copies = [torch.empty(out.shape, dtype=floats, device=device) for out in outs]
    add_weighted_outer_sums(pairs, factors_B, copies, accumulate=False)
    for out, total in zip(outs, copies, strict=True):
        out.add_(total) if accumulate else out.copy_(total)


def _add_outer_sums(
    pairs: Sequence[tuple[Tensor, Tensor]],
    factors_B: Tensor,
    outs: Sequence[Tensor],
    accumulate: bool,
    kernel: str | None,
) -> None:
    """Sums of weights only, by `triton.sums` or on any device."""
    if not outs[0].is_contiguous():
        # The transpose of a sum is the sum of the pair the other way round.
        pairs = [(g, x) for x, g in pairs]
        outs = [out.mT for out in outs]
    TAKEN["weighted sums"].add(kernel or _plain_name(*pairs[0], outs[0]))
    if kernel is not None:
        xs, gs = zip(*pairs, strict=True)
        by = choices.module(kernel)
        by.weighted_outer_sums(xs, gs, factors_B.float(), outs, accumulate)
        return
    for (x, g), out in zip(pairs, outs, strict=True):
        if is_on_cpu(x, g, out):
            cpu_weighted_outer_sum(x, g, factors_B, out, accumulate)
        else:
            plain.weighted_outer_sum(x, g, factors_B, out if accumulate else out.zero_())


def _fits_triton_sum(out: Tensor) -> bool:
    """Whether the Triton kernels write sums there."""
    whole = out.is_contiguous() or out.mT.is_contiguous()
    return out.dtype is torch.float32 and whole and out.data_ptr() % ROW_ALIGNMENT_BYTES == 0


def row_sq_norms(rows_BN: Tensor) -> Tensor:
    """(B,) squared lengths of rows, float64 for float64 and float32 for all else."""
    if is_on_cpu(rows_BN):
        return cpu_row_sq_norms(rows_BN.float()).float()
    if rows_BN.is_cuda and rows_BN.dtype is torch.float32:
        # One pass: squares of large gradients would be written down and read again.
        return torch.linalg.vector_norm(rows_BN, dim=1).square_()
    return plain.widen(rows_BN).square().sum(1)


def gram_sq_norms(x_BTD: Tensor, g_BTP: Tensor, bias: bool) -> Tensor:
    """`plain.gram_sq_norms` by the fastest means at hand."""
    return gram_sq_norm_sums([(x_BTD, g_BTP)], [bias])[0]


def tile_sq_norms(x_BTD: Tensor, g_BTP: Tensor, bias: bool) -> Tensor:
    """`plain.tile_sq_norms` by the fastest means at hand."""
    return tile_sq_norm_sums([(x_BTD, g_BTP)], [bias])[0]


def weighted_outer_sum(
    x_BTD: Tensor, g_BTP: Tensor, factors_B: Tensor, out_PD: Tensor | None = None
) -> Tensor:
    """`plain.weighted_outer_sum` by the fastest means at hand."""
    if out_PD is None:
        dtype = plain.accumulator_dtype(x_BTD, g_BTP)
        shape = (g_BTP.shape[2], x_BTD.shape[2])
        out_PD = torch.empty(shape, dtype=dtype, device=x_BTD.device)
        add_weighted_outer_sums([(x_BTD, g_BTP)], factors_B, [out_PD], accumulate=False)
    else:
        add_weighted_outer_sums([(x_BTD, g_BTP)], factors_B, [out_PD])
    return out_PD


def is_on_cpu(*tensors: Tensor) -> bool:
    """Whether these are on the CPU, not empty, and not in double precision."""
    return all(
        tensor.device.type == "cpu" and tensor.dtype is not torch.float64 and tensor.numel() > 0
        for tensor in tensors
    )


def _plain_name(*tensors: Tensor) -> str:
    """The name of what serves these where no GPU kernel does."""
    return "cpu" if is_on_cpu(*tensors) else "plain"


def cpu_row_sq_norms(rows_BN: Tensor) -> Tensor:
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


def cpu_gram_sq_norms(pairs: Sequence[tuple[Tensor, Tensor]], bias: bool) -> list[Tensor]:
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


def cpu_tile_sq_norms(x_BTD: Tensor, g_BTP: Tensor, bias: bool) -> Tensor:
    """`plain.tile_sq_norms` with tiles that fit the caches."""
    x_BTD, g_BTP = x_BTD.float(), g_BTP.float()
    narrow, wide = (x_BTD, g_BTP) if x_BTD.shape[2] <= g_BTP.shape[2] else (g_BTP, x_BTD)
    squares_B = _product_sq_norms(narrow.mT, wide)
    if bias:
        squares_B += cpu_row_sq_norms(g_BTP.sum(1))
    return plain.with_room(squares_B, x_BTD, g_BTP, bias)


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
        cpu_row_sq_norms(torch.bmm(left_BST, columns_BTK).flatten(1))
        for columns_BTK in right_BTC.split(step, 2)
    ]
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)


def cpu_weighted_outer_sum(
    x_BTD: Tensor, g_BTP: Tensor, factors_B: Tensor, out_PD: Tensor, accumulate: bool = True
) -> Tensor:
    """`plain.weighted_outer_sum` with the factors on the smaller operand.

    Unless `accumulate`, what `out_PD` holds is overwritten.
    """
    if not bool(factors_B.all()):
        start_PD = out_PD if accumulate else out_PD.zero_()
        return plain.weighted_outer_sum(x_BTD, g_BTP, factors_B, start_PD)
    x_BTD, g_BTP = x_BTD.float(), g_BTP.float()
    factors_B11 = factors_B.to(x_BTD.dtype)[:, None, None]
    if x_BTD.shape[2] <= g_BTP.shape[2]:
        x_BTD = x_BTD * factors_B11
    else:
        g_BTP = g_BTP * factors_B11
    left, right = g_BTP.flatten(0, 1).mT, x_BTD.flatten(0, 1)
    return out_PD.addmm_(left, right) if accumulate else torch.mm(left, right, out=out_PD)
