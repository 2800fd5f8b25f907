"""Linear maps: per-sample norms and clipped sums, by the fastest kernels that serve the tensors.

On a CUDA device Triton serves half precision, and float32 where TF32 is allowed; `plain` serves
everything else. All results agree to float32 rounding. Shapes as in `plain`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shuffled_dpsgd.clipping.kernels import choices, plain
from shuffled_dpsgd.clipping.kernels.choices import MIN_WIDTH, ROW_ALIGNMENT_BYTES, aligned
from shuffled_dpsgd.runtime.backends import TAKEN

# A shorter sample does not fill blocks of 16 tokens well enough.
MIN_TOKENS = 8
Pair = tuple[Tensor, Tensor]


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


def gram_sq_norm_sums(pairs: Sequence[Pair], biases: Sequence[bool]) -> list[Tensor]:
    """(B,) tensors that add up to all `plain.gram_sq_norms`; layers of one shape share a launch."""
    found: list[Tensor] = []
    for run in alike(pairs, biases):
        x, g = pairs[run[0]]
        kernel = None
        if fits_triton_linear(x, g):
            kernel = choices.gram_norms(x.device, x.dtype, max(x.shape[2], g.shape[2]))
        TAKEN["norms by Gram matrices"].add(kernel or "plain")
        if kernel is not None:
            xs, gs = zip(*(pairs[i] for i in run), strict=True)
            found.append(choices.module(kernel).gram_sq_norms(xs, gs, biases[run[0]]).sum(0))
        else:
            found += [plain.gram_sq_norms(*pairs[i], biases[i]) for i in run]
    return found


def tile_sq_norm_sums(pairs: Sequence[Pair], biases: Sequence[bool]) -> list[Tensor]:
    """(B,) tensors that add up to all `plain.tile_sq_norms`; layers of one shape share a launch."""
    found: list[Tensor] = []
    for run in alike(pairs, biases):
        x, g = pairs[run[0]]
        kernel = None
        if fits_triton_linear(x, g):
            kernel = "triton.tiles" if choices.may_take(choices.KERNELS, x.device) else None
        TAKEN["norms by tiles"].add(kernel or "plain")
        if kernel is not None:
            xs, gs = zip(*(pairs[i] for i in run), strict=True)
            found.append(choices.module(kernel).tile_sq_norms(xs, gs, biases[run[0]]).sum(0))
        else:
            found += [plain.tile_sq_norms(*pairs[i], biases[i]) for i in run]
    return found


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


def _add_outer_sums(
    pairs: Sequence[Pair],
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
    TAKEN["weighted sums"].add(kernel or "plain")
    if kernel is not None:
        xs, gs = zip(*pairs, strict=True)
        by = choices.module(kernel)
        by.weighted_outer_sums(xs, gs, factors_B.float(), outs, accumulate)
        return
    for (x, g), out in zip(pairs, outs, strict=True):
        plain.weighted_outer_sum(x, g, factors_B, out, accumulate)


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
