"""The running sums and norms since the last reset."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

# Kernels read wide words. A sum of this many elements, or a multiple, leaves the next one aligned.
_ALIGNMENT = 64


def lie_apart(device: torch.device) -> bool:
    """Whether every sum there has memory of its own, instead of a part of one buffer."""
    return device.type == "cpu"


class Totals:
    """Running results since the last reset.

    The sums of all parameters on one accelerator lie in one buffer, made when the first of them is
    needed. An operation on the buffer is then one operation instead of hundreds. Tensors handed
    out belong to whoever holds them: after a reset there are new ones.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._parameters = dict(parameters)
        self._sums: dict[str, Tensor] = {}
        self.norms: list[Tensor] = []

    @property
    def sums(self) -> dict[str, Tensor]:
        """The sum of each parameter, float64 for float64 parameters and float32 for others."""
        if not self._sums:
            self._make(zero=True)
        return self._sums

    @contextmanager
    def adding(self) -> Iterator[tuple[dict[str, Tensor], bool]]:
        """The sums, and whether they are new and empty; new ones are forgotten on failure."""
        new = not self._sums
        if new:
            self._make(zero=False)
        try:
            yield self._sums, new
        except BaseException:
            if new:
                self._sums = {}
            raise

    def clear(self) -> None:
        """Forget everything; tensors handed out before are left alone."""
        self._sums = {}
        self.norms = []

    def _make(self, *, zero: bool) -> None:
        places: dict[tuple[torch.device, torch.dtype], list[str]] = {}
        for name, parameter in self._parameters.items():
            wide = torch.float64 if parameter.dtype == torch.float64 else torch.float32
            places.setdefault((parameter.device, wide), []).append(name)
        found: dict[str, Tensor] = {}
        for (device, dtype), names in places.items():
            shapes = {name: self._parameters[name].shape for name in names}
            options: Any = {"dtype": dtype, "device": device}
            if lie_apart(device):
                found |= {name: new_memory(shape, zero, options) for name, shape in shapes.items()}
            else:
                found |= self._cut(shapes, zero, options)
        self._sums = {name: found[name] for name in self._parameters}

    def _cut(self, shapes: Mapping[str, torch.Size], zero: bool, options: Any) -> dict[str, Tensor]:
        """The sums of these shapes, side by side in a buffer."""
        # Whole blocks first, so that the odd sizes of small parameters misalign no other.
        names = sorted(shapes, key=lambda name: shapes[name].numel() % _ALIGNMENT != 0)
        sizes = [shapes[name].numel() for name in names]
        buffer = new_memory(torch.Size([sum(sizes)]), zero, options)
        with torch.no_grad():
            parts = zip(names, buffer.split(sizes), strict=True)
            return {name: part.view(shapes[name]) for name, part in parts}


def new_memory(shape: torch.Size, zero: bool, options: Any) -> Tensor:
    """A tensor with zeros or anything in it."""
    return (torch.zeros if zero else torch.empty)(shape, **options)
