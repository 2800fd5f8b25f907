"""Linear maps: `nn.Linear` and Hugging Face's transposed `Conv1D`.

Shapes: B samples, T positions (all axes between the first and the last), D inputs, P outputs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from shuffled_dpsgd.clipping.capture.captures import (
    Capture,
    InputAndGradient,
    StoredGradients,
)
from shuffled_dpsgd.clipping.capture.slot import (
    Slot,
    enter,
    no_view,
    recorder_of,
    size_of,
)
from shuffled_dpsgd.clipping.contributions import cost
from shuffled_dpsgd.clipping.contributions.kinds import (
    Contribution,
    OuterGrad,
    RowSumGrad,
    stored_outer,
)

if TYPE_CHECKING:
    from shuffled_dpsgd.clipping.capture.batch import CapturedBatch
    from shuffled_dpsgd.clipping.rules.attention import ProjectionsSlot


_ROW_BLOCK = 128
# Fewer outputs than this are not worth padding.
_MIN_PADDED_ROWS = 4096


class LinearFunction(torch.autograd.Function):
    """F.linear whose backward computes the input's gradient and records (input, gradient).

    `part` is the number of the map in a slot of several, and 0 in others.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        part: int,
        lower: bool,
        slot: LinearSlot | ProjectionsSlot,
        batch: CapturedBatch,
        anchor: Tensor,
    ) -> Tensor:
        outputs, kept = weight.shape[0], weight
        if lower:
            rows = slot.rows_of_zeros
            weight = lowered(weight, x.dtype, rows)
            bias = None if bias is None else lowered(bias, x.dtype, rows)
        ctx.part, ctx.slot, ctx.batch = part, slot, batch
        kept = kept if _lowers_again(slot) else weight
        ctx.save_for_backward(x if slot.keeps_input else None, kept)
        if weight.shape[0] == outputs:
            return no_view(F.linear(x, weight, bias))
        # Slice before the view: with the view in between, a compiler keeps the padded outputs as
        # well as what the loss makes of the slice.
        flat = F.linear(x.reshape(-1, x.shape[-1]), weight, bias)[:, :outputs]
        return flat.view(*x.shape[:-1], outputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        if weight.dtype is not g.dtype:
            weight = lowered(weight, g.dtype, ctx.slot.rows_of_zeros)
        g = kept = _in_rows(g)
        if weight.shape[0] != g.shape[-1]:
            g = _padded(g, weight.shape[0])
            # What leaves a compiled graph should lie in whole, aligned rows.
            kept = g if torch.compiler.is_compiling() else g[..., : kept.shape[-1]]
        anchor = recorder_of(ctx.slot).record(ctx.batch, ctx.slot, (x, kept), ctx.part)
        grad_x = g.matmul(weight) if ctx.needs_input_grad[0] else None
        return grad_x, *[None] * 6, anchor


def _lowers_again(slot: LinearSlot | ProjectionsSlot) -> bool:
    """Traced code must not read this off the slot: each compiled run would check it again."""
    return not torch.compiler.is_compiling() and slot.lowers_again


def _in_rows(g: Tensor) -> Tensor:
    """In a compiled graph, a contiguous gradient: the kernels read captures row by row.

    The gradient of attention's keys comes transposed, and the product with the weight needs rows.
    """
    return g.contiguous() if torch.compiler.is_compiling() else g


def _padded(g: Tensor, width: int) -> Tensor:
    """Rows with zeros appended.

    With `cat` a compiler lets whatever computes `g` write into the wider rows directly. `F.pad`
    would be another pass over all of them.
    """
    flat = g.reshape(-1, g.shape[-1])
    flat = torch.cat([flat, flat.new_zeros(flat.shape[0], width - flat.shape[1])], 1)
    return flat.view(*g.shape[:-1], width)


def lowered(parameter: Tensor, dtype: torch.dtype, rows: int) -> Tensor:
    """The parameter in another precision; on a GPU with `rows` rows of zeros added."""
    if parameter.dtype is dtype:
        return parameter
    lower = parameter.to(dtype)
    if rows == 0 or not lower.is_cuda:
        return lower
    return F.pad(lower, (*(0, 0) * (lower.dim() - 1), 0, rows))


def bias_grads(g_BTP: Tensor) -> Tensor:
    return RowSumGrad(grad_BTP=g_BTP).stored(g_BTP.shape[2:])


def positions(tensor: Tensor) -> Tensor:
    """(B, ..., D) seen as (B, T, D)."""
    if tensor.dim() == 3:
        return tensor
    if tensor.dim() == 2:
        return tensor.unsqueeze(1)
    return tensor.flatten(1, -2)


# With fewer positions than this, none is left out.
FEWEST = 4


def live_positions(g_BTP: Tensor) -> slice | None:
    """From the first to the last position at which some sample has a gradient, if that saves half.

    A classifier that reads one token gives its last layers a gradient at that token only. The other
    positions add nothing to norms or sums, but cost as much as any. Only on a CPU: on a GPU the
    host would have to wait for the answer. The slice depends on this batch alone, so that a resumed
    run rounds as one that was never interrupted.

    The middle position is looked at first, because a gradient there nearly always means that
    nothing can be left out. NaN counts as a gradient.
    """
    T = g_BTP.shape[1]
    if g_BTP.device.type != "cpu" or T < FEWEST or g_BTP.numel() == 0:
        return None
    if bool(g_BTP[:, T // 2].any()):
        return None
    is_live_T = (g_BTP.amax((0, 2)) != 0) | (g_BTP.amin((0, 2)) != 0)
    live = is_live_T.nonzero().flatten().tolist() or [0]
    first, end = live[0], live[-1] + 1
    return slice(first, end) if 2 * (end - first) <= T else None


def without_silence(x_BTD: Tensor, g_BTP: Tensor) -> tuple[Tensor, Tensor]:
    """The same pair without positions that add nothing to g^T x.

    Nothing is left out if an input is not finite: infinity times a gradient of zero is not zero.
    """
    live = live_positions(g_BTP)
    if live is None or not math.isfinite(x_BTD.sum()):
        return x_BTD, g_BTP
    return x_BTD[:, live], g_BTP[:, live]


def run_linear(slot: LinearSlot, x: Tensor, *, transposed: bool = False) -> Tensor:
    """The forward of a linear map; not a method, for the same reason as `batch_of`."""
    if not torch.is_grad_enabled():
        return cast(Tensor, slot.plain(x))
    batch, listens, recorder = enter(slot)
    size = batch.size if listens else size_of(batch)
    if x.shape[0] != size:
        x = slot.over_batch(x, size)
    lower = torch.is_autocast_enabled(batch.device) and x.dtype is not torch.float64
    if lower:
        x = x.to(torch.get_autocast_dtype(batch.device))
    weight, bias = cast(Tensor, slot.parameters["weight"]), slot.parameters["bias"]
    weight = weight.t() if transposed else weight
    listens = listens and not (lower and slot.lowers_again)
    if x.requires_grad and listens:
        return slot.listen(x, weight, bias, batch)
    out = LinearFunction.apply(x, weight, bias, 0, lower, slot, batch, recorder.anchor)
    return cast(Tensor, out)


class LinearSlot(Slot):
    """A linear map with a trainable weight, a trainable bias, or both."""

    kind = "linear"
    may_fold = True
    transposed = False
    fixed_backend = None
    # Under autocast, whether the backward casts the weight once more instead of keeping the copy.
    lowers_again = False

    def __init__(self, **site: Any) -> None:
        super().__init__(**site)
        self.keeps_input = self.weight_name is not None
        weight = cast(Tensor, self.parameters["weight"])
        self.outputs = weight.shape[1 if self.transposed else 0]
        # Matrix products of odd size run several times slower on tensor cores. So half-precision
        # copies of such a weight (a vocabulary of 50,257) get rows of zeros added.
        self.rows_of_zeros = 0
        if not self.transposed and self.outputs >= _MIN_PADDED_ROWS:
            self.rows_of_zeros = -self.outputs % _ROW_BLOCK
        # The backend of the latest call, and of which inputs it holds.
        self._backend = cost.NormMethod.GRAM
        self._decided_for: tuple[torch.Size, torch.dtype, torch.device] | None = None

    def forward(self, input: Tensor) -> Tensor:
        return run_linear(self, input)

    def listen(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, batch: CapturedBatch
    ) -> Tensor:
        """The same by autograd's own operations, for eager mode."""
        weight = lowered(weight.detach(), x.dtype, self.rows_of_zeros)
        bias = None if bias is None else lowered(bias.detach(), x.dtype, self.rows_of_zeros)
        out = F.linear(x, weight, bias)
        self.recorder.listen(out, batch, self, x if self.keeps_input else None)
        # The weight's half-precision copy may have had rows of zeros added.
        return out if out.shape[-1] == self.outputs else out[..., : self.outputs]

    def heard(self, size: int, x: Tensor | None, g: Tensor) -> Capture:
        # The output may be a view of a flat matrix product, whose gradient this is.
        g_BTP = g.reshape(size, -1, g.shape[-1]) if g.dim() == 2 else g
        return self._decided(x, self._without_padding(g_BTP))

    def captured(self, part: int, tensors: Sequence[Tensor]) -> Capture:
        x = None if self.weight_name is None else tensors[0]
        return self._decided(x, self._without_padding(tensors[-1]))

    def _without_padding(self, g: Tensor) -> Tensor:
        return g if g.shape[-1] == self.outputs else g[..., : self.outputs]

    def contributions(self, capture: Capture) -> list[tuple[str, Contribution]]:
        if isinstance(capture, StoredGradients):
            return capture.contributions(self.weight_name, self.bias_name)
        found: list[tuple[str, Contribution]] = []
        assert isinstance(capture, InputAndGradient)
        g_BTP = positions(capture.g)
        if self.weight_name is not None:
            x_BTD = positions(cast(Tensor, capture.x))
            left, right = (x_BTD, g_BTP) if self.transposed else (g_BTP, x_BTD)
            outer = OuterGrad(left_BTR=left, right_BTC=right, backend=capture.backend)
            found.append((self.weight_name, outer))
        if self.bias_name is not None:
            found.append((self.bias_name, RowSumGrad(grad_BTP=g_BTP)))
        return found

    def _decided(self, x: Tensor | None, g: Tensor) -> Capture:
        """The pair with the way to its norm, chosen once per call; or stored gradients instead."""
        if x is None:
            return StoredGradients(None, bias_grads(positions(g)))
        if g.dim() > 2 and g.device.type == "cpu":
            x, g = without_silence(positions(x), positions(g))
        like = (x.shape[1:], x.dtype, x.device)
        if like != self._decided_for:
            self._decided_for = like
            T = x.numel() // (x.shape[0] * x.shape[-1])
            self.last_shape = (T, self.outputs, x.shape[-1])
            self.last_device = x.device.type
            self._backend = self.choose(*self.last_shape, self.last_device)
        if self._backend is not cost.NormMethod.INSTANTIATE:
            return InputAndGradient(x, g, self._backend)
        g_BTP, x_BTD = positions(g), positions(x)
        left, right = (x_BTD, g_BTP) if self.transposed else (g_BTP, x_BTD)
        weight_BS, squares_B = stored_outer(left, right)
        bias_BS = None if self.bias_name is None else bias_grads(g_BTP)
        return StoredGradients(weight_BS, bias_BS, squares_B)


class Conv1DSlot(LinearSlot):
    """Hugging Face's Conv1D, a linear map with its weight stored as (inputs, outputs)."""

    kind = "conv1d-hf"
    transposed = True

    def forward(self, x: Tensor) -> Tensor:
        return run_linear(self, x, transposed=True)


def keep_no_copies(slots: Iterable[Slot]) -> None:
    """Have backwards cast weights once more, where copies of all would be whole on every rank."""
    for slot in slots:
        if isinstance(slot, LinearSlot):
            slot.lowers_again = True
