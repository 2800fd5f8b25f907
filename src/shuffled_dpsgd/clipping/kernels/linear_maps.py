"""Linear maps: per-sample norms and clipped sums, by the fastest kernels that serve the tensors.

On a CUDA device Triton serves half precision, and float32 where TF32 is allowed; `plain` serves
everything else. All results agree to float32 rounding. Shapes as in `plain`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shuffled_dpsgd.clipping.kernels import choices, plain
from shuffled_dpsgd.clipping.kernels.choices import MIN_WIDTH, ROW_ALIGNMENT_BYTES, aligned
from shuffled_dpsgd.clipping.kernels.plain import Pair
from shuffled_dpsgd.runtime.backends import TAKEN

# A shorter sample does not fill blocks of 16 tokens well enough.
MIN_TOKENS = 8
# The names of ways to norms, and what they do.
_NORMS = {"gram_sq_norms": "norms by Gram matrices", "tile_sq_norms": "norms by tiles"}


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


def alike(pairs: Sequence[Pair], labels: Sequence[object]) -> list[list[int]]:
    """Indices of `pairs` in runs that one launch can serve: same shapes, strides and label."""
    runs: dict[object, list[int]] = {}
    for index, ((x, g), label) in enumerate(zip(pairs, labels, strict=True)):
        key = (x.shape, g.shape, x.stride(), g.stride(), x.dtype, g.dtype, label)
        runs.setdefault(key, []).append(index)
    return list(runs.values())


def _norm_kernel(way: str, x: Tensor, g: Tensor) -> str | None:
    if not fits_triton_linear(x, g):
        return None
    if way == "gram_sq_norms":
        return choices.gram_norms(x.device, x.dtype, max(x.shape[2], g.shape[2]))
    return "triton.tiles" if choices.may_take(choices.KERNELS, x.device) else None


def _sq_norm_sums(way: str, pairs: Sequence[Pair], biases: Sequence[bool]) -> list[Tensor]:
    """(B,) tensors that add up to the norms of all pairs; layers of one shape share a launch."""
    found: list[Tensor] = []
    for run in alike(pairs, biases):
        some, bias = [pairs[i] for i in run], biases[run[0]]
        kernel = _norm_kernel(way, *some[0])
        TAKEN[_NORMS[way]].add(kernel or "plain")
        if kernel is None:
            found += plain.many_sq_norms(getattr(plain, way), some, bias)
        else:
            xs, gs = zip(*some, strict=True)
            found.append(getattr(choices.module(kernel), way)(xs, gs, bias).sum(0))
    return found


gram_sq_norm_sums = partial(_sq_norm_sums, "gram_sq_norms")
tile_sq_norm_sums = partial(_sq_norm_sums, "tile_sq_norms")


def add_weighted_outer_sums(
    pairs: Sequence[Pair],
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
    rest: list[int] = []
    rows: list[int] = []
    for run in alike(pairs, labels):
        chosen, targets = [pairs[i] for i in run], [outs[i] for i in run]
        x, g = chosen[0]
        kernel = choices.outer_sums(x.device, x.dtype) if fits_triton_linear(x, g) else None
        TAKEN["weighted sums"].add(kernel or "plain")
        if kernel is None:
            rest += run
        elif not all(_fits_triton_sum(out) for out in targets):
            _add_through_copies(chosen, factors_B, targets, accumulate)
            rows += run
        elif kernel == "gluon.weighted_sums":
            added = [bias for i in run if (bias := wanted[i]) is not None]
            _launch_sums(kernel, chosen, factors_B, targets, accumulate, added)
        else:
            if not targets[0].is_contiguous():
                # The transpose of a sum is the sum of the pair the other way round.
                chosen, targets = [(g, x) for x, g in chosen], [out.mT for out in targets]
            _launch_sums(kernel, chosen, factors_B, targets, accumulate)
            rows += run
    plain.add_weighted_outer_sums(
        [pairs[i] for i in rest], factors_B, [outs[i] for i in rest], accumulate
    )
    rows_of = [(pairs[i][1], bias) for i in rest + rows if (bias := wanted[i]) is not None]
    plain.add_weighted_row_sums(
        [g for g, _ in rows_of], factors_B, [bias for _, bias in rows_of], accumulate
    )


def _launch_sums(
    kernel: str, pairs: Sequence[Pair], factors_B: Tensor, *outs_and_more: Any
) -> None:
    xs, gs = zip(*pairs, strict=True)
    choices.module(kernel).weighted_outer_sums(xs, gs, factors_B.float(), *outs_and_more)


def _add_through_copies(
    pairs: Sequence[Pair],
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


def _fits_triton_sum(out: Tensor) -> bool:
    """Whether the Triton kernels write sums there."""
    whole = out.is_contiguous() or out.mT.is_contiguous()
    return out.dtype is torch.float32 and whole and out.data_ptr() % ROW_ALIGNMENT_BYTES == 0


def row_sq_norms(rows_BN: Tensor) -> Tensor:
    """(B,) squared lengths of rows, float64 for float64 and float32 for all else."""
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
