"""Picks, for the tensors at hand, between Triton kernels, CPU forms and the plain definitions.

Triton serves half-precision linear layers and any layer norm on a CUDA device, `host` single and
half precision on a CPU; everything else, and every GPU without Triton, is served by `plain`. All
results agree to float32 rounding.
Shapes as in `plain`; L is a number of layers.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import os
from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from shuffled_dpsgd.clipping.kernels import host, plain, tables
from shuffled_dpsgd.clipping.kernels.alignment import MIN_WIDTH, ROW_ALIGNMENT_BYTES, aligned

HALF = (torch.bfloat16, torch.float16)
# A shorter sample does not fill blocks of 16 tokens well enough.
MIN_TOKENS = 8
# Fewer numbers than this are not worth a launch of their own.
MIN_STORED = 1 << 16
# Releases of Triton in whose Gluon `triton_products` and `triton_strips` are written; others may
# call things otherwise.
GLUON_VERSIONS = ("3.6.",)
# One program reads a pair of blocks of tokens alone; past this width they are shared out.
MAX_GRAM_WIDTH = 16384


@functools.cache
def triton_available() -> bool:
    """Whether Triton can be imported; SHUFFLED_DPSGD_TRITON=0 says no."""
    if os.environ.get("SHUFFLED_DPSGD_TRITON", "1") == "0":
        return False
    return importlib.util.find_spec("triton") is not None


@functools.cache
def triton(name: str) -> ModuleType:
    """The module of Triton kernels of that name, imported when first asked for."""
    return importlib.import_module(f"shuffled_dpsgd.clipping.kernels.triton_{name}")


@functools.cache
def serves_gluon(device: torch.device) -> bool:
    """Whether kernels written in Gluon for Hopper run on this device."""
    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
    return hopper and importlib.metadata.version("triton").startswith(GLUON_VERSIONS)


def kind_of(tensor: Tensor) -> str:
    """The kind of device, as far as it matters to the cost of products of such tensors."""
    if tensor.is_cuda and tensor.dtype in HALF and triton_available():
        return "hopper" if serves_gluon(tensor.device) else "cuda"
    return tensor.device.type


def tile_norms(device: torch.device) -> ModuleType:
    """The module whose norms by tiles are fastest on this device."""
    return triton("squares" if serves_gluon(device) else "tiles")


def outer_sums(device: torch.device) -> ModuleType:
    """The module whose weighted sums are fastest on this device."""
    return triton("parted" if serves_gluon(device) else "sums")


def gram_norms(device: torch.device, tokens: int) -> ModuleType:
    """The module whose norms by Gram matrices of so many tokens are fastest on this device."""
    if not triton("gram").MIN_TOKENS <= tokens <= triton("gram").MAX_TOKENS:
        return triton("linear")
    return triton("strips" if serves_gluon(device) else "gram")


def fits_triton_linear(x_BTD: Tensor, g_BTP: Tensor) -> bool:
    """Whether the Triton kernels take this pair."""
    B, T, D = x_BTD.shape
    return (
        x_BTD.is_cuda
        and x_BTD.dtype == g_BTP.dtype
        and x_BTD.dtype in HALF
        and B > 0
        and T >= MIN_TOKENS
        and min(D, g_BTP.shape[2]) >= MIN_WIDTH
        and triton_available()
        and aligned(x_BTD)
        and aligned(g_BTP)
    )


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
        fits = fits_triton_linear(x, g)
        if fits and max(x.shape[2], g.shape[2]) > MAX_GRAM_WIDTH:
            found += [triton("wide").gram_sq_norms(*pairs[i], biases[i]) for i in run]
        elif fits:
            xs, gs = zip(*(pairs[i] for i in run), strict=True)
            kernel = gram_norms(x.device, x.shape[1])
            found.append(kernel.gram_sq_norms(xs, gs, biases[run[0]]).sum(0))
        elif host.serves(x, g):
            found += host.gram_sq_norms([pairs[i] for i in run], biases[run[0]])
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
        if fits_triton_linear(*pairs[run[0]]):
            xs, gs = zip(*(pairs[i] for i in run), strict=True)
            kernel = tile_norms(xs[0].device)
            found.append(kernel.tile_sq_norms(xs, gs, biases[run[0]]).sum(0))
        else:
            module = host if host.serves(*pairs[run[0]]) else plain
            found += [module.tile_sq_norms(*pairs[i], biases[i]) for i in run]
    return found


def stored_products(left_BTR: Tensor, right_BTC: Tensor) -> tuple[Tensor, Tensor]:
    """Every sample's left^T right, (B, R, C), accumulated wide, and its (B,) squared norm."""
    (B, _, R), C = left_BTR.shape, right_BTC.shape[2]
    if fits_triton_linear(right_BTC, left_BTR) and serves_gluon(left_BTR.device):
        squares = triton("squares")
        if squares.fills_gpu(left_BTR.shape[1], R, C):
            stored = torch.empty(B, R, C, dtype=torch.float32, device=left_BTR.device)
            norms_LB = squares.tile_sq_norms([right_BTC], [left_BTR], False, [stored])
            return stored, norms_LB[0]
    stored = plain.outer_products(left_BTR, right_BTC)
    return stored, row_sq_norms(stored.flatten(1))


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
        on_gpu = fits_triton_linear(*chosen[0])
        if on_gpu and not all(_fits_triton_sum(out) for out in targets):
            # By the kernels all the same: norms may be exact for what these compute, no more.
            floats, device = torch.float32, targets[0].device
            apart = [torch.empty(out.shape, dtype=floats, device=device) for out in targets]
            add_weighted_outer_sums(chosen, factors_B, apart, accumulate=False)
            for out, total in zip(targets, apart, strict=True):
                out.add_(total) if accumulate else out.copy_(total)
            if added:
                add_weighted_row_sums([g for _, g in chosen], factors_B, added, accumulate)
            continue
        kernel = outer_sums(targets[0].device) if on_gpu else None
        if kernel is not None and kernel.TAKES_BIASES:
            xs, gs = zip(*chosen, strict=True)
            kernel.weighted_outer_sums(xs, gs, factors_B.float(), targets, accumulate, added)
            continue
        if added:
            add_weighted_row_sums([g for _, g in chosen], factors_B, added, accumulate)
        if not targets[0].is_contiguous():
            # The transpose of a sum is the sum of the pair the other way round.
            chosen = [(g, x) for x, g in chosen]
            targets = [out.mT for out in targets]
        if kernel is not None:
            xs, gs = zip(*chosen, strict=True)
            kernel.weighted_outer_sums(xs, gs, factors_B.float(), targets, accumulate)
            continue
        for (x, g), out in zip(chosen, targets, strict=True):
            if host.serves(x, g, out):
                host.weighted_outer_sum(x, g, factors_B, out, accumulate)
            else:
                plain.weighted_outer_sum(x, g, factors_B, out if accumulate else out.zero_())


def _fits_triton_sum(out: Tensor) -> bool:
    """Whether the Triton kernels write sums there."""
    whole = out.is_contiguous() or out.mT.is_contiguous()
    return out.dtype is torch.float32 and whole and out.data_ptr() % ROW_ALIGNMENT_BYTES == 0


def is_stored_gradient(g_B1N: Tensor) -> bool:
    """Whether these are large per-sample gradients that Triton sums."""
    return (
        g_B1N.is_cuda
        and g_B1N.dtype is torch.float32
        and g_B1N.shape[1] == 1
        and g_B1N.shape[2] >= MIN_STORED
        and g_B1N.is_contiguous()
        and triton_available()
    )


def add_weighted_row_sums(
    gs: Sequence[Tensor], factors_B: Tensor, outs: Sequence[Tensor], accumulate: bool = True
) -> None:
    """Add each sum_b f_b sum_t g_bt into its (P,) `out`, or overwrite it unless `accumulate`."""
    for run in alike([(g, g) for g in gs], [out.dtype for out in outs]):
        g = gs[run[0]]
        if fits_triton_linear(g, g) and outs[run[0]].dtype == torch.float32:
            kernel = triton("rows").weighted_row_sums
            chosen = [outs[i] for i in run]
            kernel([gs[i] for i in run], factors_B.float(), chosen, accumulate)
        elif is_stored_gradient(g) and all(
            outs[i].dtype == torch.float32 and outs[i].is_contiguous() for i in run
        ):
            for i in run:
                kernel = triton("rows").weighted_stored_sum
                kernel(gs[i].squeeze(1), factors_B.float(), outs[i], accumulate)
        else:
            for i in run:
                out = outs[i] if accumulate else outs[i].zero_()
                plain.weighted_row_sum(gs[i], factors_B, out)


def embedding_sq_norms(ids_BT: Tensor, g_BTD: Tensor, padding_idx: int | None) -> Tensor:
    """`plain.embedding_sq_norms` by the fastest means at hand."""
    if host.serves(g_BTD):
        return host.embedding_sq_norms(ids_BT, g_BTD, padding_idx)
    if tables.serves_rows(g_BTD):
        return _tables(g_BTD).embedding_sq_norms(ids_BT, g_BTD, padding_idx)
    return plain.embedding_sq_norms(ids_BT, g_BTD, padding_idx)


def tied_cross_terms(
    x_BTD: Tensor, gl_BTV: Tensor, ids_BS: Tensor, ge_BSD: Tensor, padding_idx: int | None
) -> Tensor:
    """`plain.tied_cross_terms` by the fastest means at hand; on matrix units it errs upwards."""
    module = _tables(x_BTD) if tables.serves_ties(x_BTD, gl_BTV, ge_BSD) else plain
    return module.tied_cross_terms(x_BTD, gl_BTV, ids_BS, ge_BSD, padding_idx)


def stored_cross_terms(
    head_BVD: Tensor, ids_BS: Tensor, ge_BSD: Tensor, padding_idx: int | None
) -> Tensor:
    """`plain.stored_cross_terms` by the fastest means at hand."""
    floats = torch.float64 not in (head_BVD.dtype, ge_BSD.dtype)
    serves = head_BVD.is_cuda and floats and head_BVD.is_contiguous() and ge_BSD.numel() > 0
    module = triton("tables") if serves and triton_available() else plain
    return module.stored_cross_terms(head_BVD, ids_BS, ge_BSD, padding_idx)


def _tables(of_BTD: Tensor) -> ModuleType:
    """The module for tables on a GPU: a launch needs Triton, and something to do."""
    return triton("tables") if of_BTD.numel() > 0 and triton_available() else tables


def weighted_embedding_sum(
    ids_BT: Tensor, g_BTD: Tensor, factors_B: Tensor, padding_idx: int | None, out_VD: Tensor
) -> Tensor:
    """`plain.weighted_embedding_sum` by the fastest means at hand."""
    adds_at_once = (
        g_BTD.is_cuda
        and g_BTD.numel() > 0
        and out_VD.dtype is torch.float32
        and out_VD.is_contiguous()
        and g_BTD.dtype is not torch.float64
        and triton_available()
        # Rows that several tokens pick are added to in whatever order comes.
        and not torch.are_deterministic_algorithms_enabled()
    )
    if not adds_at_once:
        return plain.weighted_embedding_sum(ids_BT, g_BTD, factors_B, padding_idx, out_VD)
    triton("tables").weighted_embedding_sum(ids_BT, g_BTD, factors_B.float(), padding_idx, out_VD)
    return out_VD


def row_sq_norms(rows_BN: Tensor) -> Tensor:
    """(B,) squared lengths of rows, float64 for float64 and float32 for all else."""
    if host.serves(rows_BN):
        return host.row_sq_norms(rows_BN.float()).float()
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


def weighted_row_sum(g_BTP: Tensor, factors_B: Tensor, out_P: Tensor | None = None) -> Tensor:
    """`plain.weighted_row_sum` by the fastest means at hand."""
    if out_P is None:
        out_P = torch.zeros(
            g_BTP.shape[2], dtype=plain.accumulator_dtype(g_BTP), device=g_BTP.device
        )
    add_weighted_row_sums([g_BTP], factors_B, [out_P])
    return out_P


def fits_triton_norm(x_BTD: Tensor, g_BTD: Tensor) -> bool:
    """Whether the Triton norm kernel takes these tensors."""
    return (
        x_BTD.is_cuda
        and x_BTD.numel() > 0
        and torch.float64 not in (x_BTD.dtype, g_BTD.dtype)
        and triton_available()
        and x_BTD.shape[-1] <= triton("norms").MAX_WIDTH
        and x_BTD.is_contiguous()
        and g_BTD.is_contiguous()
        and aligned(x_BTD)
        and aligned(g_BTD)
    )


def norm_sum_runs(
    pairs: Sequence[tuple[Tensor, Tensor]], epsilons: Sequence[float], centred: Sequence[bool]
) -> list[tuple[list[int], Tensor]]:
    """`plain.norm_sums` of every (x_BTD, g_BTD), stacked for layers of one shape.

    Each result names the pairs it is of and holds their sums, (L, B, 2 or 1, D).
    """
    found: list[tuple[list[int], Tensor]] = []
    for run in alike(pairs, list(zip(epsilons, centred, strict=True))):
        eps, with_mean = epsilons[run[0]], centred[run[0]]
        if fits_triton_norm(*pairs[run[0]]):
            xs, gs = zip(*(pairs[i] for i in run), strict=True)
            sums_LBCD = triton("norms").norm_sums(xs, gs, eps, with_mean)
        else:
            sums_LBCD = torch.stack([plain.norm_sums(*pairs[i], eps, with_mean) for i in run])
        found.append((run, sums_LBCD))
    return found
