"""Gradients reduced to a few hundred numbers each, so that two of them can be compared later.

A sketch adds up the rows of a tensor with random signs. It is linear, so the sketch of a sum is
the sum of the sketches, and its length is that of the tensor to within a few percent.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

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
    padded = F.pad(wide, (0, rows * _WIDTH - flat.numel())).view(rows, _WIDTH)
    return (_signs(rows, wide.dtype, wide.device) @ padded).double()


@functools.lru_cache(maxsize=64)
def _signs(rows: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(rows)
    bits = torch.randint(0, 2, (rows,), generator=generator, device="cpu")
    return (2 * bits - 1).to(device=device, dtype=dtype)


def length(sketches: Mapping[str, Tensor]) -> float:
    """The length of all sketches together."""
    squares = [float(part.square().sum()) for part in sketches.values()]
    return sum(squares) ** 0.5


def distances(one: Sketches, other: Sketches) -> dict[str, float]:
    """How far apart two gradients are, parameter by parameter; what is missing is zero."""
    found = {}
    for name in one.keys() | other.keys():
        a, b = one.get(name), other.get(name)
        difference = a - b if a is not None and b is not None else a if b is None else b
        assert difference is not None
        found[name] = float(difference.norm())
    return found
