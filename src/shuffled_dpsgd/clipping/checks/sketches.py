"""Gradients reduced to a few hundred numbers each, so that two of them can be compared later.

A sketch adds up the rows of a tensor with random signs. It is linear, so the sketch of a sum is
the sum of the sketches, and its length is that of the tensor to within a few percent.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

_WIDTH = 512
Sketches = dict[str, Tensor]


def sketch(tensor: Tensor) -> Tensor:
    """At most 512 numbers in float64, linear in the tensor."""
    flat = _padded(tensor.detach().reshape(1, -1))
    if flat.shape[1] <= _WIDTH:
        return flat.view(-1).double()
    rows = flat.shape[1] // _WIDTH
    return (_signs_for(flat, rows) @ flat.view(rows, _WIDTH)).double()


def sketches_of(tensors: Tensor) -> Tensor:
    """The sketches of tensors of one shape, which are given as rows."""
    flat = _padded(tensors.detach().reshape(len(tensors), -1))
    if flat.shape[1] <= _WIDTH:
        return flat.double()
    count, rows = len(flat), flat.shape[1] // _WIDTH
    # No matrix product: on a GPU its inputs may be rounded to TF32.
    signed = flat.view(count, rows, _WIDTH) * _signs_for(flat, rows).unsqueeze(1)
    return signed.sum(1).double()


def _padded(flat: Tensor) -> Tensor:
    """Rows of whole sketches, wide enough to be added up; short ones as they are."""
    numbers = flat.shape[1]
    if numbers <= _WIDTH:
        return flat
    wide = flat if flat.dtype is torch.float64 else flat.float()
    missing = -numbers % _WIDTH
    return F.pad(wide, (0, missing)) if missing else wide


def _signs_for(flat: Tensor, rows: int) -> Tensor:
    on_gpu = flat.device.type == "cuda"
    stream = torch.cuda.current_stream(flat.device).cuda_stream if on_gpu else 0
    return _signs(rows, flat.dtype, flat.device, stream)


@functools.lru_cache(maxsize=64)
def _signs(rows: int, dtype: torch.dtype, device: torch.device, stream: int) -> Tensor:
    """Random signs, for use on one stream."""
    generator = torch.Generator("cpu").manual_seed(rows)
    bits = torch.randint(0, 2, (rows,), generator=generator, device="cpu")
    signs = (2 * bits - 1).to(dtype)
    # From pinned memory a GPU copies without the host waiting for all it has been given to do.
    return signs.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else signs


def length(sketches: Mapping[str, Tensor]) -> float:
    """The length of all sketches together."""
    return sum(x * x for x in _lengths([*sketches.values()])) ** 0.5


def distances(one: Sketches, other: Sketches) -> dict[str, float]:
    """How far apart two gradients are, parameter by parameter; what is missing is zero."""
    both = [name for name in one if name in other]
    rest = [name for name in (*one, *other) if (name in one) is not (name in other)]
    apart = [(one if name in one else other)[name] for name in rest]
    if both:
        # One call for all of them: a model has hundreds.
        ones, others = ([some[name] for name in both] for some in (one, other))
        apart = [*torch._foreach_sub(ones, others), *apart]
    return dict(zip([*both, *rest], _lengths(apart), strict=True))


def _lengths(tensors: Sequence[Tensor]) -> list[float]:
    return on_host(torch._foreach_norm(list(tensors))) if tensors else []


def on_host(numbers: Sequence[Tensor]) -> list[float]:
    """Single numbers of one type, for which the host waits once for each device."""
    by_device: dict[torch.device, list[int]] = {}
    for place, number in enumerate(numbers):
        by_device.setdefault(number.device, []).append(place)
    found = [0.0] * len(numbers)
    for places in by_device.values():
        together = torch.stack([numbers[place] for place in places]).tolist()
        for place, value in zip(places, together, strict=True):
            found[place] = value
    return found
