"""One watched batch: how it was called, what it drew, what was booked for a few of its samples.

The gradients that arrive at the model's outputs are kept as well, for the watched samples only, so
that the same gradients can be given to the outputs of each sample alone.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from shuffled_dpsgd.clipping.capture.batch import CapturedBatch
from shuffled_dpsgd.clipping.capture.output_tensors import batch_axis_of, tensors_in, with_tensors
from shuffled_dpsgd.clipping.capture.random_tape import Tape
from shuffled_dpsgd.clipping.capture.slot import no_view
from shuffled_dpsgd.clipping.checks.sketches import Sketches
from shuffled_dpsgd.clipping.checks.solo_runs import Autocast, HostGenerators

ModelCall = tuple[Any, Mapping[str, Any]]


@dataclass(kw_only=True)
class Watch:
    """One checked batch: how it was called, what it drew, and what was booked for some samples."""

    batch: CapturedBatch | None
    kind: Hashable
    by_coin: bool
    call: ModelCall
    size: int
    counted: int
    samples: list[int]
    autocast: Autocast
    host: HostGenerators
    tape: Tape = field(default_factory=Tape)
    booked: list[Sketches] = field(default_factory=list)
    # What rounding may do to each sample's gradient: the size of the products that were added up.
    rounding: list[list[Tensor]] = field(default_factory=list)
    norms: Tensor | None = None
    typical_norm: float = 0.0
    scale: float = 1.0
    number_scale: float = 1.0
    # For every output that the loss depends on: the gradient's rows of each sample.
    rows: dict[int, list[Tensor]] = field(default_factory=dict)
    on_trial: bool = False
    # Time spent on booking.
    seconds: float = 0.0


class OtherOutputsError(Exception):
    """Outputs of one sample that cannot be matched with those of its batch."""


class _Tap(torch.autograd.Function):
    """Passes a tensor on, and its gradient to `keep` as well."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, place: int, keep: Callable[[int, Tensor], None]) -> Tensor:
        ctx.place, ctx.keep = place, keep
        return no_view(x.view_as(x))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.keep(ctx.place, grad)
        return grad, None, None


def rows_of(grad: Tensor, watch: Watch) -> list[Tensor]:
    """Each watched sample's part of an output's gradient; all of it where there is no batch axis.

    Where two axes are as long as the batch, the sample alone will tell which of them it is.
    """
    axis = batch_axis_of(grad, watch.size)
    ambiguous = sum(length == watch.size for length in grad.shape) > 1 and watch.size > 1
    if axis is None or ambiguous:
        return [grad for _ in watch.samples]
    rows = grad.shape[axis] // watch.size
    return [grad.narrow(axis, sample * rows, rows).clone() for sample in watch.samples]


def cotangents_of(
    watch: Watch, place: int, outputs: Sequence[Tensor], among_others: bool
) -> dict[int, Tensor]:
    """Gradients of the outputs of one sample alone, or among others, from those of its batch."""
    found: dict[int, Tensor] = {}
    for index, rows in watch.rows.items():
        if index >= len(outputs):
            raise OtherOutputsError(
                f"fewer tensors among the outputs of one sample ({len(outputs)}) than of its batch"
            )
        out, grad = outputs[index], rows[place]
        if among_others:
            grad = _all_but_zero(grad, out, watch.samples[place], watch.size)
        elif grad.shape != out.shape:
            grad = _one_sample(grad, out.shape, watch.samples[place], watch.size)
        scale = watch.scale if out.dim() else watch.number_scale
        found[index] = (grad * scale if scale != 1.0 else grad).to(out.dtype)
    return found


def _all_but_zero(grad: Tensor, out: Tensor, sample: int, size: int) -> Tensor:
    """A gradient that is zero for all samples but one."""
    axis = batch_axis_of(out, size)
    if axis is None:
        raise OtherOutputsError("an output without a batch axis")
    whole = torch.zeros_like(out)
    rows = out.shape[axis] // size
    part = grad if grad.shape != out.shape else grad.narrow(axis, sample * rows, rows)
    place = whole.narrow(axis, sample * rows, rows)
    if part.shape != place.shape:
        raise OtherOutputsError(
            f"an output whose shape for one sample is {tuple(place.shape)} without the engine and "
            f"{tuple(part.shape)} with it"
        )
    place.copy_(part)
    return whole


def _one_sample(grad: Tensor, shape: torch.Size, sample: int, size: int) -> Tensor:
    if grad.numel() == shape.numel():
        return grad.reshape(shape)
    for axis in range(min(grad.dim(), len(shape))):
        if grad.shape[axis] == size and (*grad.shape[:axis], 1, *grad.shape[axis + 1 :]) == shape:
            return grad.narrow(axis, sample, 1)
    raise ValueError(f"an output of shape {tuple(shape)} alone, {tuple(grad.shape)} in the batch")


def random_cotangents(
    outputs: Sequence[Tensor], size: int, used: frozenset[int] | None, number: float
) -> dict[int, Tensor]:
    """Random gradients for outputs with a batch axis, `number` for single numbers in use."""
    found = {}
    for place, output in enumerate(outputs):
        if not output.requires_grad or (used is not None and place not in used):
            continue
        if output.dim() == 0:
            if used is not None:
                found[place] = torch.full_like(output, number)
        elif batch_axis_of(output, size) is not None:
            # On the device itself: the logits of a language model are many.
            generator = torch.Generator(output.device).manual_seed(place)
            found[place] = torch.randn(
                output.shape, generator=generator, device=output.device, dtype=output.dtype
            )
    return found


def tap_output(watch: Watch, output: Any, is_muted: Callable[[], bool]) -> Any:
    """The output with a tap on every tensor of it.

    When the backward comes, a tap keeps the watched samples' rows of what arrives from outside. A
    hook on the tensor itself would also see what comes from inside the model, where one output is
    computed from another.
    """

    def keep(place: int, grad: Tensor) -> None:
        if not is_muted() and place not in watch.rows:
            watch.rows[place] = rows_of(grad, watch)

    taps = {
        id(tensor): cast(Tensor, _Tap.apply(tensor, place, keep))
        for place, tensor in enumerate(tensors_in(output))
        if tensor.requires_grad
    }
    return with_tensors(output, taps)
