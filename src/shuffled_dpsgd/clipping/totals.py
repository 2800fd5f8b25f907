"""The running sums and norms since the last reset."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

# Sums of so many elements, or a multiple, start where kernels can read them in wide words.
_ALIGNMENT = 64


@dataclass(frozen=True, kw_only=True)
class Room:
    """Parameters whose sums share an allocation: by name, and as they are to be cut from it."""

    device: torch.device
    dtype: torch.dtype
    names: list[str]
    shapes: list[torch.Size]
    sizes: list[int]

    def made(self, *, zero: bool) -> tuple[Tensor, dict[str, Tensor]]:
        """New memory, of zeros or of whatever it holds, and the sums that lie in it."""
        make = torch.zeros if zero else torch.empty
        buffer = make(sum(self.sizes), dtype=self.dtype, device=self.device)
        with torch.no_grad():
            views = [
                view if len(shape) == 1 else view.view(shape)
                for view, shape in zip(buffer.split(self.sizes), self.shapes, strict=True)
            ]
        return buffer, dict(zip(self.names, views, strict=True))


class Totals:
    """Running results since the last reset.

    The sums of all parameters on one device lie in one allocation, made when the first of them is
    needed: filling one buffer with zeros is one operation, filling hundreds is hundreds.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = dict(parameters)
        self._sums: dict[str, Tensor] = {}
        self._buffers: list[Tensor] = []
        self._kinds: list[tuple[torch.device, torch.dtype]] = []
        self._rooms: list[Room] = []
        self.norms: list[Tensor] = []

    @property
    def sums(self) -> dict[str, Tensor]:
        """The sum of each parameter, float64 for float64 parameters and float32 for others."""
        if not self._sums:
            self._sums = self._made(zero=True)
        return self._sums

    @contextmanager
    def adding(self) -> Iterator[tuple[dict[str, Tensor], bool]]:
        """The sums to add to, and whether they are new and hold nothing yet, not even zeros.

        New sums are forgotten again if what should have filled them fails.
        """
        new = not self._sums
        if new:
            self._sums = self._made(zero=False)
        try:
            yield self._sums, new
        except BaseException:
            if new:
                self._sums, self._buffers = {}, []
            raise

    @property
    def buffers(self) -> list[Tensor]:
        """The memory that all sums lie in, each parameter's always at the same place of it."""
        return self._buffers

    def clear(self) -> None:
        """Forget everything; tensors handed out before are left alone."""
        self._sums, self._buffers = {}, []
        self.norms = []

    def _made(self, *, zero: bool) -> dict[str, Tensor]:
        kinds = [(p.device, p.dtype) for p in self._parameters.values()]
        if kinds != self._kinds:
            self._kinds, self._rooms = kinds, self._plan_rooms()
        found: dict[str, Tensor] = {}
        self._buffers = []
        for room in self._rooms:
            buffer, sums = room.made(zero=zero)
            self._buffers.append(buffer)
            found |= sums
        return {name: found[name] for name in self._parameters}

    def _plan_rooms(self) -> list[Room]:
        places: dict[tuple[torch.device, torch.dtype], list[str]] = {}
        for name, parameter in self._parameters.items():
            wide = torch.float64 if parameter.dtype == torch.float64 else torch.float32
            places.setdefault((parameter.device, wide), []).append(name)
        rooms = []
        for (device, dtype), names in places.items():
            # Whole blocks first, so that the odd sizes of small parameters misalign no other.
            names.sort(key=lambda name: self._parameters[name].numel() % _ALIGNMENT != 0)
            shapes = [self._parameters[name].shape for name in names]
            sizes = [shape.numel() for shape in shapes]
            rooms.append(Room(device=device, dtype=dtype, names=names, shapes=shapes, sizes=sizes))
        return rooms
