"""The numeric primitives of per-sample clipping in plain torch: the fallback, and the definition.

Shapes: B samples, T tokens, D input features, P output features, V rows of an embedding table.
Results are float64 for float64 inputs and float32 for everything else, whatever the inputs'
precision: norms, factors and sums never live in half precision.

A sample whose factor is zero contributes exactly zero to every weighted sum, even where its
activations or gradients are infinite or NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

# Temporaries of the quadratic primitives are cut to about this many elements.
MAX_TEMPORARY_ELEMENTS = 1 << 25
# Small layers of one shape are computed together, up to this many elements of both sides.
SMALL_ELEMENTS = 1 << 18
# Tensor cores sum this many features in one product; wider rows are cut into such shares.
SHARE = 4096
# Head room, in units in the last place, for the rounding of sums.
ROUNDING_ULPS = 2.0
# What comes into a layer, and the gradient of what goes out.
Pair = tuple[Tensor, Tensor]


def accumulator_dtype(*tensors: Tensor) -> torch.dtype:
    """float64 when any tensor is float64, else float32."""
    for tensor in tensors:
        if tensor.dtype is torch.float64:
            return torch.float64
    return torch.float32


def widen(tensor: Tensor) -> Tensor:
    """`tensor` in the precision its sums are accumulated in."""
    return tensor if tensor.dtype is torch.float64 else tensor.float()


def above_cut_off(
    squares: Tensor, reach: Tensor, *widths: int, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """Squared norms from tensor cores that multiply this type, made to err upwards.

    The cores add 16 products at a time and cut the running sum off instead of rounding it, so a
    sum of n products comes out wrong by up to n/16 units in the last place of its terms' total
    length (1e-5 of a sum of 3072 squares, as measured on an H200); `reach` is that length for a
    sample's gradient, sum_t |x_t| |g_t|. Norms found too small would let a sample exceed the clip
    norm; these are too large, by at most width · T / 2^28 of themselves where T tokens have nothing
    in common: by Gram matrices of 3840 features 0.2 % at 128 tokens, 1.5 % at 1024.

    A product of float32 is three products of TF32. The cores add these 8 at a time, but no more
    than 64 (24 units); what they find is added as usual, rounded by half a unit. The three leave
    out the product of what TF32 cuts off of both numbers, and the last bits of that: 8 units.
    """
    if dtype is torch.float32:
        units = [24 + 8 + -(-width // 128) for width in widths]
    else:
        units = [-(-width // 16) for width in widths]
    cut_off = 2.0**-23 * sum(units)
    return squares.clamp(min=0.0) + cut_off * reach.square()


def on_tensor_cores(tensor: Tensor) -> bool:
    """Whether products of this tensor are accumulated by half-precision tensor cores."""
    return tensor.is_cuda and tensor.dtype in (torch.bfloat16, torch.float16)


def slices(length: int, elements_each: int) -> Iterator[slice]:
    """Cut `range(length)` so that a slice times `elements_each` stays a bounded temporary."""
    step = max(1, MAX_TEMPORARY_ELEMENTS // max(1, elements_each))
    for start in range(0, length, step):
        yield slice(start, min(start + step, length))


def inner_products(a_BTD: Tensor, b_BSD: Tensor) -> Tensor:
    """<a_t, b_s> for every pair of tokens of a sample, (B, T, S), accumulated wide."""
    if on_tensor_cores(a_BTD):
        return products_in_shares(a_BTD, b_BSD.to(a_BTD.dtype), _half_products)
    return torch.bmm(widen(a_BTD), widen(b_BSD).mT)


def _half_products(a_BTD: Tensor, b_BSD: Tensor) -> Tensor:
    return torch.bmm(a_BTD, b_BSD.mT, out_dtype=torch.float32)


def products_in_shares(
    a_BTD: Tensor, b_BSD: Tensor, multiply: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """`multiply(a, b)`, (B, T, S), with the features of very wide tokens taken in shares.

    One sample's product of a whole vocabulary would keep a single block of a GPU busy, and tensor
    cores would cut more off of it.
    """
    B, _, D = a_BTD.shape
    shares = D // SHARE
    if shares < 2:
        return multiply(a_BTD, b_BSD)

    def shared(tensor: Tensor) -> Tensor:
        return tensor[..., : shares * SHARE].unflatten(2, (shares, SHARE)).transpose(1, 2)

    shape = (B, a_BTD.shape[1], b_BSD.shape[1])
    found = a_BTD.new_empty(shape, dtype=accumulator_dtype(a_BTD))
    for some in slices(B, D * a_BTD.shape[1]):
        a, b = a_BTD[some], b_BSD[some]
        left = shared(a).flatten(0, 1)
        right = left if a_BTD is b_BSD else shared(b).flatten(0, 1)
        total = multiply(left, right).unflatten(0, (-1, shares)).sum(1)
        if D % SHARE:
            total += multiply(a[..., shares * SHARE :], b[..., shares * SHARE :])
        found[some] = total
    return found


def stretch(width: int) -> int:
    """The width that counts for what tensor cores cut off; shares add half a unit each."""
    return width if width < 2 * SHARE else SHARE + 8 * (width // SHARE + 1)


def outer_products(left_BTR: Tensor, right_BTC: Tensor) -> Tensor:
    """Every sample's left^T right, (B, R, C), accumulated wide."""
    if on_tensor_cores(left_BTR) and left_BTR.dtype == right_BTC.dtype:
        return torch.bmm(left_BTR.mT, right_BTC, out_dtype=torch.float32)
    return torch.bmm(widen(left_BTR).mT, widen(right_BTC))


def reach(
    x_BTD: Tensor, g_BTP: Tensor, bias: bool = False, dtype: torch.dtype | None = None
) -> Tensor:
    """(B,) sum_t |x_t| |g_t|, the length of all terms; a bias counts as one more input, of one."""
    wide = accumulator_dtype(x_BTD, g_BTP) if dtype is None else dtype
    x_BT = torch.linalg.vector_norm(x_BTD, dim=2, dtype=wide)
    if bias:
        x_BT = (x_BT.square() + 1.0).sqrt()
    return (x_BT * torch.linalg.vector_norm(g_BTP, dim=2, dtype=wide)).sum(1)


def exact_inner_products(a_BTD: Tensor, b_BSD: Tensor) -> Tensor:
    """<a_t, b_s> for every pair of tokens of a sample, (B, T, S), in float64."""
    B, T, D = a_BTD.shape
    cuts = list(slices(D, B * (T + b_BSD.shape[1])))
    if len(cuts) == 1:
        a_wide = a_BTD.double()
        return torch.bmm(a_wide, a_wide.mT if a_BTD is b_BSD else b_BSD.double().mT)
    total = torch.zeros((B, T, b_BSD.shape[1]), dtype=torch.float64, device=a_BTD.device)
    for columns in cuts:
        total.baddbmm_(a_BTD[:, :, columns].double(), b_BSD[:, :, columns].double().mT)
    return total


def tokens(tensor_BTD: Tensor, rows: slice) -> Tensor:
    """Some tokens of every sample: the tensor itself if that is all of them."""
    return tensor_BTD if rows == slice(0, tensor_BTD.shape[1]) else tensor_BTD[:, rows]


def added_up(parts_B: Sequence[Tensor], of_BTD: Tensor) -> Tensor:
    """The sum of the parts of a (B,) result computed from `of_BTD`; usually there is just one."""
    if len(parts_B) == 1:
        return parts_B[0]
    wide = torch.float32 if on_tensor_cores(of_BTD) else torch.float64
    zeros_B = torch.zeros(of_BTD.shape[0], dtype=wide, device=of_BTD.device)
    return torch.stack([zeros_B, *parts_B]).sum(0)


def not_too_small(squares_B: Tensor, reach_B: Tensor, dtype: torch.dtype) -> Tensor:
    """Squared norms with head room for the rounding of the sums they have to bound.

    A sample's gradient may be a small difference of large terms. Then its weighted sum is rounded
    relative to those terms, whose total length is `reach_B`, and so is a float64 Gram matrix of
    float64 inputs. In all other cases the head room is a few units in the last place.
    """
    rounding = ROUNDING_ULPS * torch.finfo(dtype).eps
    if dtype == torch.float64:
        return squares_B + rounding * reach_B.square()
    norms_B = squares_B.clamp(min=0.0).sqrt_()
    return norms_B.add_(reach_B, alpha=rounding).square_().to(dtype)


def with_room(squares_B: Tensor, x_BTD: Tensor, g_BTP: Tensor, bias: bool) -> Tensor:
    """Squared norms of g^T x, and of a bias, with that head room."""
    return not_too_small(squares_B, reach(x_BTD, g_BTP, bias), accumulator_dtype(x_BTD, g_BTP))


def gram_sq_norms(x_BTD: Tensor, g_BTP: Tensor, bias: bool) -> Tensor:
    """||sum_t g_t x_t^T||^2 of each sample (plus ||sum_t g_t||^2 with `bias`), by Gram matrices.

    sum_{t,s} <x_t, x_s> <g_t, g_s>; the bias adds 1 to every <x_t, x_s>. The terms may cancel to
    any degree, so they are added in float64: in float32 a sample whose tokens' gradients nearly
    cancel would be found arbitrarily small and escape its clipping. A single token's gradient is as
    long as its input and its gradient say.
    """
    B, T, _ = x_BTD.shape
    dtype = accumulator_dtype(x_BTD, g_BTP)
    if T == 1:
        reach_B = reach(x_BTD, g_BTP, bias, torch.float64)
        return not_too_small(reach_B.square(), reach_B, dtype)
    if x_BTD.device.type == "cpu" and dtype is torch.float32:
        found_B = _factored_sq_norms(x_BTD, g_BTP, bias)
        if found_B is not None:
            return found_B
    on_cores = on_tensor_cores(x_BTD)
    products = inner_products if on_cores else exact_inner_products
    parts = []
    for rows in slices(T, B * T):
        x_gram = products(tokens(x_BTD, rows), x_BTD)
        if bias:
            x_gram += 1.0
        parts.append(x_gram.mul_(products(tokens(g_BTP, rows), g_BTP)).sum((1, 2)))
    total_B = added_up(parts, x_BTD)
    reach_B = reach(x_BTD, g_BTP, bias, total_B.dtype)
    if on_cores:
        return above_cut_off(total_B, reach_B, stretch(x_BTD.shape[2]), stretch(g_BTP.shape[2]))
    return not_too_small(total_B, reach_B, dtype)


def _factored_sq_norms(x_BTD: Tensor, g_BTP: Tensor, bias: bool) -> Tensor | None:
    """The same with one Gram matrix instead of two: with X X^T = L L^T, ||G^T X|| = ||G^T L||.

    X is the narrower side. Token t's row of L is as long as x_t, so that rounding G^T L to float32
    costs a norm no more than rounding G^T X would. Repeated tokens make X X^T singular; its
    diagonal is enlarged by what the rounding of it and of L can amount to (Demmel 1989), which errs
    upwards. None where that saves nothing, and where tokens are not finite.
    """
    is_input = x_BTD.shape[2] <= g_BTP.shape[2]
    narrow, wide = (x_BTD, g_BTP.float()) if is_input else (g_BTP, x_BTD.float())
    B, T, D = narrow.shape
    if D < T or not B:
        return None
    gram_BTT = exact_inner_products(narrow, narrow)
    if bias and is_input:
        gram_BTT += 1.0
    diagonal_BT = gram_BTT.diagonal(dim1=1, dim2=2)
    lengths_BT = diagonal_BT.sqrt()
    diagonal_BT.mul_(1.0 + T * (T + D + 4) * 2.0**-52).clamp_(min=1e-200)
    lower_BTT, failed_B = torch.linalg.cholesky_ex(gram_BTT)
    if bool(failed_B.any()):
        return None
    squares_B = torch.bmm(lower_BTT.float().mT, wide).square_().flatten(1).sum(1).double()
    wide_BT = torch.linalg.vector_norm(wide, dim=2).double()
    if bias and not is_input:
        squares_B += lower_BTT.sum(1).square().sum(1)
        wide_BT = (wide_BT.square() + 1.0).sqrt()
    return not_too_small(squares_B, (wide_BT * lengths_BT).sum(1), torch.float32)


def tile_sq_norms(x_BTD: Tensor, g_BTP: Tensor, bias: bool) -> Tensor:
    """The same norms from tiles of the weight gradient; no tile outlives its square."""
    B, _, D = x_BTD.shape
    x_BTD, g_BTP = widen(x_BTD), widen(g_BTP)
    total_B = torch.zeros(B, dtype=accumulator_dtype(x_BTD, g_BTP), device=x_BTD.device)
    for columns in slices(g_BTP.shape[2], B * D):
        total_B = total_B + torch.bmm(g_BTP[:, :, columns].mT, x_BTD).square_().sum((1, 2))
    if bias:
        total_B = total_B + g_BTP.sum(1).square().sum(1)
    return with_room(total_B, x_BTD, g_BTP, bias)


def in_batches(pairs: Sequence[Pair]) -> Iterator[Pair]:
    """Layers of one shape as if they were one layer with the samples of all.

    Asking for an operation takes longer than computing it for a small layer. Large ones stay alone.
    """
    x_BTD, g_BTP = pairs[0]
    at_once = max(1, SMALL_ELEMENTS // max(1, x_BTD.numel() + g_BTP.numel()))
    for first in range(0, len(pairs), at_once):
        some = pairs[first : first + at_once]
        if len(some) == 1:
            yield some[0]
        else:
            xs, gs = zip(*some, strict=True)
            yield torch.cat(xs), torch.cat(gs)


def many_sq_norms(
    norms: Callable[[Tensor, Tensor, bool], Tensor], pairs: Sequence[Pair], bias: bool
) -> list[Tensor]:
    """(B,) tensors that add up to the `norms` of layers of one shape."""
    gradients_of: dict[int, tuple[Tensor, list[Tensor]]] = {}
    for x, g in pairs:
        gradients_of.setdefault(id(x), (x, []))[1].append(g)
    # Layers with one input, such as queries, keys and values, count as one wider layer.
    layers: dict[int, list[Pair]] = {}
    for x, gs in gradients_of.values():
        may_join = len(gs) * gs[0].numel() <= MAX_TEMPORARY_ELEMENTS
        for g in [torch.cat(gs, 2)] if may_join and len(gs) > 1 else gs:
            layers.setdefault(g.shape[2], []).append((x, g))
    B = len(pairs[0][0])
    batches = [batch for of_one_width in layers.values() for batch in in_batches(of_one_width)]
    found = [norms(x, g, bias) for x, g in batches]
    return [part if len(part) == B else part.view(-1, B).sum(0) for part in found]


def embedding_sq_norms(ids_BT: Tensor, g_BTD: Tensor, padding_idx: int | None) -> Tensor:
    """Squared norms of table gradients; tokens that share a row are added up first, in float64."""
    B, T, D = g_BTD.shape
    if padding_idx is not None:
        g_BTD = torch.where((ids_BT == padding_idx)[:, :, None], 0.0, g_BTD)
    squares_B = torch.zeros(B, dtype=torch.float64, device=g_BTD.device)
    for some in slices(B, T * max(T, D)):
        ids, g = ids_BT[some], g_BTD[some].double()
        first_BT = (ids[:, :, None] == ids[:, None, :]).byte().argmax(2)
        first_BT += T * torch.arange(len(ids), device=ids.device)[:, None]
        rows_ND = torch.zeros_like(g).flatten(0, 1)
        rows_ND.index_add_(0, first_BT.flatten(), g.flatten(0, 1))
        squares_B[some] = rows_ND.square_().view_as(g).sum((1, 2))
    reach_B = torch.linalg.vector_norm(widen(g_BTD), dim=2).double().sum(1)
    return not_too_small(squares_B, reach_B, accumulator_dtype(g_BTD))


def tied_cross_terms(
    x_BTD: Tensor, gl_BTV: Tensor, ids_BS: Tensor, ge_BSD: Tensor, padding_idx: int | None
) -> Tensor:
    """<head's gradient, embedding's gradient> of each sample, for a table that serves as both.

    sum_s <ge_s, sum_t gl_t[id_s] x_t>; the squared norm of the tied table needs twice this. The
    inner sums are in float64, or on tensor cores. There the result errs upwards: cutting off loses
    at most T/16 units in the last place of sum_t |gl_t[id_s]| |x_t| (see `above_cut_off`), and
    multiplying by ge_s fewer than two more.
    """
    (B, T, D), S = x_BTD.shape, ids_BS.shape[1]
    if padding_idx is not None:
        ge_BSD = torch.where((ids_BS != padding_idx)[:, :, None], ge_BSD, 0.0)
    on_cores = on_tensor_cores(x_BTD) and x_BTD.dtype == gl_BTV.dtype
    wide = torch.float32 if on_cores else torch.float64
    rows_BSD = torch.zeros(B, S, D, dtype=wide, device=x_BTD.device)
    reach_BS = torch.zeros(B, S, dtype=torch.float32, device=x_BTD.device)
    for some in slices(T, B * S):
        x, gl = tokens(x_BTD, some), tokens(gl_BTV, some)
        picked_BTS = gl.gather(2, ids_BS[:, None, :].expand(-1, x.shape[1], -1))
        if on_cores:
            rows_BSD += torch.bmm(picked_BTS.mT, x, out_dtype=torch.float32)
            lengths_BT1 = torch.linalg.vector_norm(x, dim=2, keepdim=True, dtype=torch.float32)
            reach_BS += (picked_BTS.abs() * lengths_BT1).sum(1)
        else:
            rows_BSD.baddbmm_(picked_BTS.double().mT, x.double())
    cross_B = (rows_BSD.double() * ge_BSD).sum((1, 2)).to(accumulator_dtype(x_BTD, ge_BSD))
    if not on_cores:
        return cross_B
    reach_B = (reach_BS * torch.linalg.vector_norm(ge_BSD, dim=2, dtype=torch.float32)).sum(1)
    return cross_B + 2.0**-23 * (-(-T // 16) + 2) * reach_B


def stored_cross_terms(
    head_BVD: Tensor, ids_BS: Tensor, ge_BSD: Tensor, padding_idx: int | None
) -> Tensor:
    """The same where the head's gradient is stored: sum_s <head[id_s], ge_s>, in float64."""
    if padding_idx is not None:
        ge_BSD = torch.where((ids_BS != padding_idx)[:, :, None], ge_BSD, 0.0)
    picked_BSD = head_BVD.gather(1, ids_BS[:, :, None].expand(ge_BSD.shape))
    return (picked_BSD.double() * ge_BSD.double()).sum((1, 2))


def may_hold_zeros(factors_B: Tensor) -> bool:
    """Whether some factor may be zero; on a GPU always, as looking would make the host wait."""
    return factors_B.device.type != "cpu" or not bool(factors_B.all())


def scaled_rows(g_BTP: Tensor, factors_B: Tensor) -> Tensor:
    """f_b g_b in wide precision, exactly zero where f_b is zero."""
    factors = factors_B.to(accumulator_dtype(g_BTP))[:, None, None]
    scaled = widen(g_BTP) * factors
    return torch.where(factors == 0, 0.0, scaled) if may_hold_zeros(factors_B) else scaled


def weighted_outer_sum(
    x_BTD: Tensor,
    g_BTP: Tensor,
    factors_B: Tensor,
    out_PD: Tensor | None = None,
    accumulate: bool = True,
) -> Tensor:
    """sum_b f_b g_b^T x_b, (P, D); added to `out_PD` if given, or written there to overwrite it."""
    factors_B11 = factors_B.to(accumulator_dtype(x_BTD, g_BTP))[:, None, None]
    x_BTD, g_BTP = widen(x_BTD), widen(g_BTP)
    if may_hold_zeros(factors_B):
        x_BTD, g_BTP = (torch.where(factors_B11 == 0, 0.0, side) for side in (x_BTD, g_BTP))
    # On the smaller operand.
    if x_BTD.shape[2] < g_BTP.shape[2]:
        x_BTD = x_BTD * factors_B11
    else:
        g_BTP = g_BTP * factors_B11
    left, right = g_BTP.flatten(0, 1).mT, x_BTD.flatten(0, 1)
    return left @ right if out_PD is None else out_PD.addmm_(left, right, beta=int(accumulate))


def add_weighted_outer_sums(
    pairs: Sequence[tuple[Tensor, Tensor]],
    factors_B: Tensor,
    outs: Sequence[Tensor],
    accumulate: bool,
) -> None:
    """Add each pair's sum_b f_b g_b^T x_b to its (P, D) `out`, or overwrite it."""
    for (x, g), out in zip(pairs, outs, strict=True):
        weighted_outer_sum(x, g, factors_B, out, accumulate)


def weighted_row_sum(g_BTP: Tensor, factors_B: Tensor, out_P: Tensor | None = None) -> Tensor:
    """sum_b f_b sum_t g_bt, (P,); added into `out_P` when that is given.

    Positions are added up first, pairwise: one matrix-vector product over everything would add them
    one after the other, and round more.
    """
    wide = accumulator_dtype(g_BTP)
    sums_BP = g_BTP[:, 0].to(wide) if g_BTP.shape[1] == 1 else g_BTP.sum(1, dtype=wide)
    factors_B = factors_B.to(wide)
    if may_hold_zeros(factors_B):
        sums_BP = torch.where(factors_B[:, None] == 0, 0.0, sums_BP)
    return sums_BP.mT @ factors_B if out_P is None else out_P.addmv_(sums_BP.mT, factors_B)


def add_weighted_row_sums(
    gs: Sequence[Tensor], factors_B: Tensor, outs: Sequence[Tensor], accumulate: bool = True
) -> None:
    """Add each sum_b f_b sum_t g_bt into its (P,) `out`, or overwrite it unless `accumulate`."""
    for g, out in zip(gs, outs, strict=True):
        weighted_row_sum(g, factors_B, out if accumulate else out.zero_())


def weighted_embedding_sum(
    ids_BT: Tensor, g_BTD: Tensor, factors_B: Tensor, padding_idx: int | None, out_VD: Tensor
) -> Tensor:
    """Add sum_b f_b [row id_bt += g_bt] into `out_VD`, leaving row `padding_idx` alone."""
    scaled = scaled_rows(g_BTD, factors_B)
    if padding_idx is not None:
        scaled = torch.where((ids_BT == padding_idx)[:, :, None], 0.0, scaled)
    return out_VD.index_add_(0, ids_BT.flatten(), scaled.flatten(0, 1).to(out_VD.dtype))


def layer_norm_backward(
    x_BTD: Tensor,
    g_BTD: Tensor,
    weight_D: Tensor | None,
    mean_BT1: Tensor,
    rstd_BT1: Tensor,
    needs_grad_x: bool = True,
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Gradient of a layer norm over the last axis: (grad_x, weight's (B, D), bias's (B, D))."""
    grad_x = None
    if needs_grad_x:
        grad_x = torch.ops.aten.native_layer_norm_backward(
            g_BTD,
            x_BTD,
            [x_BTD.shape[-1]],
            mean_BT1,
            rstd_BT1,
            weight_D,
            None,
            [True, False, False],
        )[0]
    wide_g = widen(g_BTD)
    x_hat = (widen(x_BTD) - mean_BT1) * rstd_BT1
    return grad_x, (wide_g * x_hat).sum(1), wide_g.sum(1)


def norm_sums(xs: Sequence[Tensor], gs: Sequence[Tensor], eps: float) -> Tensor:
    """Per-sample gradients of L layer norms' weights and biases: (L, B, 2, D)."""
    found = []
    for x_BTD, g_BTD in in_batches(list(zip(xs, gs, strict=True))):
        x, g = widen(x_BTD), widen(g_BTD)
        x = x - x.mean(-1, keepdim=True)
        x_hat = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()
        found.append(torch.stack([(g * x_hat).sum(1), g.sum(1)], 1))
    return torch.cat(found).unflatten(0, (len(xs), len(xs[0])))
