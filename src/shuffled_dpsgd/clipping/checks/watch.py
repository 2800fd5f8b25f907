"""What is kept of a batch until it is compared: its call, its random states, gradients at outputs.

A tap on every output keeps the gradient that comes back from the loss. A watched sample is then run
again with that sample's part of it, and zero for all others.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from shuffled_dpsgd.clipping.capture.batch import CapturedBatch
from shuffled_dpsgd.clipping.capture.output_tensors import tensors_in, with_tensors
from shuffled_dpsgd.clipping.capture.slot import no_view
from shuffled_dpsgd.clipping.checks.random_states import RandomStates
from shuffled_dpsgd.clipping.checks.sketches import Sketches
from shuffled_dpsgd.clipping.checks.solo_runs import Autocast

ModelCall = tuple[Any, Mapping[str, Any]]


@dataclass(kw_only=True)
class Watch:
    """One checked batch: how it was called, and what was booked for some samples."""

    batch: CapturedBatch | None
    kind: Hashable
    by_coin: bool
    call: ModelCall
    size: int
    counted: int
    samples: list[int]
    autocast: Autocast
    states: RandomStates
    booked: list[Sketches] = field(default_factory=list)
    # What rounding may do to each sample's gradient: the size of the products that were added up.
    rounding: list[list[Tensor]] = field(default_factory=list)
    norms: Tensor | None = None
    # Samples whose gradients are finite: others would make zeros times infinity of a zero.
    finite: list[int] = field(default_factory=list)
    typical_norm: float = 0.0
    scale: float = 1.0
    # For every output that the loss depends on: its gradient, and what it was.
    cotangents: dict[int, Tensor] = field(default_factory=dict)
    outputs: dict[int, Tensor] = field(default_factory=dict)
    on_trial: bool = False
    # Time spent on booking.
    seconds: float = 0.0

    def watch_samples(self, samples: list[int]) -> None:
        """Book for these samples from here on."""
        self.samples = samples
        self.booked = [{} for _ in samples]
        self.rounding = [[] for _ in samples]

    @property
    def has_numbers(self) -> bool:
        """Whether the loss is a single number that the model computed itself."""
        return any(grad.dim() == 0 for grad in self.cotangents.values())

    @property
    def num_readings(self) -> int:
        """In how many ways the batch may lie in the outputs: an axis may be as long by chance."""
        axes = [len(_axes_of(grad.shape, self.size)) for grad in self.cotangents.values()]
        return max(1, *axes)


class OtherOutputsError(Exception):
    """Outputs that cannot be matched with those of the batch."""


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


def cotangents_of(
    watch: Watch, sample: int, outputs: Sequence[Tensor], reading: int, row: int
) -> dict[int, Tensor]:
    """Gradients of the outputs that are zero for all rows but the one with the sample."""
    found: dict[int, Tensor] = {}
    for index, kept in watch.cotangents.items():
        if index >= len(outputs):
            raise OtherOutputsError(
                f"{len(outputs)} tensors among the outputs of a batch, fewer than before"
            )
        out, grad = outputs[index], kept.detach()
        if out.dim():
            grad = _of_sample(grad, out, (sample, row), watch.size, reading)
        found[index] = (grad * watch.scale if watch.scale != 1.0 else grad).to(out.dtype)
    return found


def row_of(tensor: Tensor, sample: int, size: int, reading: int = 0) -> Tensor:
    """One sample's part of an output; all of it where it has no batch axis."""
    axes = _axes_of(tensor.shape, size)
    if not axes:
        return tensor
    axis = axes[min(reading, len(axes) - 1)]
    rows = tensor.shape[axis] // size
    return tensor.narrow(axis, sample * rows, rows)


def _axes_of(shape: torch.Size, size: int) -> list[int]:
    """The axes that may be the batch's: as long as it, or the first with rows for each sample."""
    exact = [axis for axis, length in enumerate(shape) if length == size]
    folded = [0] if len(shape) and shape[0] > 0 and shape[0] % size == 0 else []
    return exact or folded


def _of_sample(
    grad: Tensor, out: Tensor, moved: tuple[int, int], size: int, reading: int
) -> Tensor:
    other = OtherOutputsError(
        f"an output whose shape is {tuple(out.shape)} without the engine and "
        f"{tuple(grad.shape)} with it, for {size} samples"
    )
    if grad.dim() != out.dim() or not _axes_of(grad.shape, size):
        raise other
    whole = torch.zeros_like(grad)
    row_of(whole, moved[1], size, reading).copy_(row_of(grad, moved[0], size, reading))
    for axis, (length, now) in enumerate(zip(grad.shape, out.shape, strict=True)):
        # What is padding for all samples may be cut off; then nothing of the sample is there.
        if now < length:
            if bool(whole.narrow(axis, now, length - now).any()):
                raise other
            whole = whole.narrow(axis, 0, now)
        elif now > length:
            missing = [*whole.shape[:axis], now - length, *whole.shape[axis + 1 :]]
            whole = torch.cat([whole, whole.new_zeros(missing)], axis)
    return whole


def random_cotangents(
    outputs: Sequence[Tensor], size: int, used: frozenset[int] | None, number: float | None
) -> dict[int, Tensor]:
    """Random gradients for outputs with a batch axis; `number`, if any, for single numbers."""
    found = {}
    for place, output in enumerate(outputs):
        if not output.requires_grad or (used is not None and place not in used):
            continue
        if output.dim() == 0:
            if number is not None:
                found[place] = torch.full_like(output, number)
        elif _axes_of(output.shape, size):
            # On the device itself: the logits of a language model are many.
            generator = torch.Generator(output.device).manual_seed(place)
            found[place] = torch.randn(
                output.shape, generator=generator, device=output.device, dtype=output.dtype
            )
    return found


def tap_output(watch: Watch, output: Any, is_muted: Callable[[], bool]) -> Any:
    """The output with a tap on every tensor of it.

    When the backward comes, a tap keeps what arrives from outside. A hook on the tensor itself
    would also see what comes from inside the model, where one output is computed from another.
    """
    found = {place: each for place, each in enumerate(tensors_in(output)) if each.requires_grad}

    def keep(place: int, grad: Tensor) -> None:
        if not is_muted() and place not in watch.cotangents:
            watch.cotangents[place] = grad.detach()
            watch.outputs[place] = found[place].detach()

    taps = {id(each): cast(Tensor, _Tap.apply(each, place, keep)) for place, each in found.items()}
    return with_tensors(output, taps)
