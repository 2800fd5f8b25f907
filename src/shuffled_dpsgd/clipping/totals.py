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
    shapes: list[Tensor]

    def made(self, *, zero: bool) -> dict[str, Tensor]:
        """New sums, of zero or of whatever the memory holds."""
        size = sum(tensor.numel() for tensor in self.shapes)
        make = torch.zeros if zero else torch.empty
        buffer = make(size, dtype=self.dtype, device=self.device)
        views = torch._utils._unflatten_dense_tensors(buffer, self.shapes)
        return dict(zip(self.names, views, strict=True))


class Totals:
    """Running results since the last reset.

    The sums of all parameters on one device lie in one allocation, made when the first of them is
    needed: filling one buffer with zeros is one operation, filling hundreds is hundreds.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = dict(parameters)
        self._sums: dict[str, Tensor] = {}
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
            self._sums = {} if new else self._sums
            raise

    def clear(self) -> None:
        """Forget everything; tensors handed out before are left alone."""
        self._sums = {}
        self.norms = []

    def _made(self, *, zero: bool) -> dict[str, Tensor]:
        kinds = [(p.device, p.dtype) for p in self._parameters.values()]
        if kinds != self._kinds:
            self._kinds, self._rooms = kinds, self._plan_rooms()
        found: dict[str, Tensor] = {}
        for room in self._rooms:
            found |= room.made(zero=zero)
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
            # Without memory: the parameters' own would be kept alive when they are moved.
            shapes = [torch.empty(self._parameters[n].shape, device="meta") for n in names]
            rooms.append(Room(device=device, dtype=dtype, names=names, shapes=shapes))
        return rooms
