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
    flat = tensor.detach().reshape(-1)
    if flat.numel() <= _WIDTH:
        return flat.double()
    rows = -(-flat.numel() // _WIDTH)
    wide = flat if flat.dtype is torch.float64 else flat.float()
    missing = rows * _WIDTH - flat.numel()
    padded = F.pad(wide, (0, missing)) if missing else wide
    return (_signs(rows, wide.dtype, wide.device) @ padded.view(rows, _WIDTH)).double()


@functools.lru_cache(maxsize=64)
def _signs(rows: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(rows)
    bits = torch.randint(0, 2, (rows,), generator=generator, device="cpu")
    return (2 * bits - 1).to(device=device, dtype=dtype)


def length(sketches: Mapping[str, Tensor]) -> float:
    """The length of all sketches together."""
    return sum(x * x for x in _lengths([*sketches.values()])) ** 0.5


def distances(one: Sketches, other: Sketches) -> dict[str, float]:
    """How far apart two gradients are, parameter by parameter; what is missing is zero."""
    names = [*one, *(name for name in other if name not in one)]
    apart = [_difference(one.get(name), other.get(name)) for name in names]
    return dict(zip(names, _lengths(apart), strict=True))


def _difference(a: Tensor | None, b: Tensor | None) -> Tensor:
    if a is not None and b is not None:
        return a - b
    found = a if b is None else b
    assert found is not None
    return found


def _lengths(tensors: Sequence[Tensor]) -> list[float]:
    # One call for all of them: a model has hundreds.
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
