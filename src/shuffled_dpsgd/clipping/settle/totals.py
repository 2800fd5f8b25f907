"""The running sums and norms since the last reset."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from shuffled_dpsgd.clipping.settle.reused_memory import Shell, Spare, counts_are_understood

# Sums of so many elements, or a multiple, start where kernels can read them in wide words.
_ALIGNMENT = 64
_kind = attrgetter("device", "dtype")


def lie_apart(device: torch.device) -> bool:
    """Whether every sum has memory of its own there, rather than a part of one buffer."""
    return device.type == "cpu"


@dataclass(frozen=True, kw_only=True)
class Room:
    """Parameters whose sums share an allocation: by name, and as they are to be cut from it."""

    device: torch.device
    dtype: torch.dtype
    names: list[str]
    shapes: list[torch.Size]
    sizes: list[int]

    def made(
        self, *, zero: bool, spare: Spare | None = None
    ) -> tuple[Tensor | None, dict[str, Tensor]]:
        """New memory, of zeros or of whatever it holds, and the sums that lie in it.

        On a CPU every sum has memory of its own, the `spare` one where there is some, and the first
        result is None.
        """
        make = torch.zeros if zero else torch.empty
        options: Any = {"dtype": self.dtype, "device": self.device}
        if lie_apart(self.device):
            apart = {}
            for name, shape in zip(self.names, self.shapes, strict=True):
                found = None if spare is None else spare.take(name, shape, self.dtype)
                if found is not None and zero:
                    found.zero_()
                apart[name] = make(shape, **options) if found is None else found
            return None, apart
        buffer = make(sum(self.sizes), **options)
        with torch.no_grad():
            views = [
                view if len(shape) == 1 else view.view(shape)
                for view, shape in zip(buffer.split(self.sizes), self.shapes, strict=True)
            ]
        return buffer, dict(zip(self.names, views, strict=True))


class Totals:
    """Running results since the last reset.

    The sums of all parameters on one accelerator lie in one allocation, made when the first of them
    is needed: an operation on one buffer is one operation, on hundreds of tensors it is hundreds.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = dict(parameters)
        self._sums: dict[str, Tensor] = {}
        self._buffers: list[Tensor] = []
        self._spare: Spare | None = None
        self._shells: list[Shell] = []
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
        """The memory that sums on accelerators lie in, each always at the same place of it."""
        return self._buffers

    def clear(self) -> None:
        """Forget everything; tensors handed out before are left alone."""
        if self._sums and not self._buffers:
            self._spare = Spare(self._sums)
        self._sums, self._buffers = {}, []
        self.norms = []
        self.let_go()

    def let_go(self) -> None:
        """Give back the memory of forgotten sums on accelerators, as soon as nobody has them."""
        if not self._sums:
            for shell in self._shells:
                shell.let_go()

    def _made(self, *, zero: bool) -> dict[str, Tensor]:
        kinds = [*map(_kind, self._parameters.values())]
        if kinds != self._kinds:
            self._kinds, self._rooms, self._shells = kinds, self._plan_rooms(), []
        found = self._used_again(zero=zero) or self._cut(zero=zero)
        self._spare = None
        return {name: found[name] for name in self._parameters}

    def _used_again(self, *, zero: bool) -> dict[str, Tensor] | None:
        """The tensors of the last sums with memory again, unless somebody has some of them."""
        if not self._shells or not all(shell.take(zero=zero) for shell in self._shells):
            return None
        self._buffers = [shell.buffer for shell in self._shells]
        return {name: total for shell in self._shells for name, total in shell.sums().items()}

    def _cut(self, *, zero: bool) -> dict[str, Tensor]:
        made = [room.made(zero=zero, spare=self._spare) for room in self._rooms]
        self._buffers = [buffer for buffer, _ in made if buffer is not None]
        self._shells = []
        if len(self._buffers) == len(made) and counts_are_understood():
            self._shells = [Shell(buffer, sums) for buffer, sums in made if buffer is not None]
        return {name: total for _, sums in made for name, total in sums.items()}

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
