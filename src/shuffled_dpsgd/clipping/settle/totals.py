"""The running sums and norms since the last reset."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from shuffled_dpsgd.clipping.settle.reused_memory import (
    ReusableBuffer,
    ReusableTensors,
    counts_are_understood,
)

# Kernels read wide words. A sum of this many elements, or a multiple, leaves the next one aligned.
_ALIGNMENT = 64
_kind = attrgetter("device", "dtype")


def lie_apart(device: torch.device) -> bool:
    """Whether every sum there has memory of its own, instead of a part of one buffer."""
    return device.type == "cpu"


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """Parameters whose sums share one allocation: their names, and the parts to cut it into."""

    device: torch.device
    dtype: torch.dtype
    names: list[str]
    shapes: list[torch.Size]
    sizes: list[int]

    def allocate(
        self, *, zero: bool, reusable: ReusableTensors | None = None
    ) -> tuple[Tensor | None, dict[str, Tensor]]:
        """New memory, with zeros or anything in it, and the sums that lie in it.

        On a CPU every sum has memory of its own, taken from `reusable` where possible, and the
        first result is None.
        """
        make = torch.zeros if zero else torch.empty
        options: Any = {"dtype": self.dtype, "device": self.device}
        if lie_apart(self.device):
            apart = {}
            for name, shape in zip(self.names, self.shapes, strict=True):
                found = None if reusable is None else reusable.take(name, shape, self.dtype)
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

    The sums of all parameters on one accelerator lie in one buffer, made when the first of them is
    needed. An operation on the buffer is then one operation instead of hundreds.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._parameters = dict(parameters)
        self._sums: dict[str, Tensor] = {}
        self._buffers: list[Tensor] = []
        # What the next sums may use again: on a CPU, and on accelerators.
        self._reusable: ReusableTensors | None = None
        self._reusable_buffers: list[ReusableBuffer] = []
        self._kinds: list[tuple[torch.device, torch.dtype]] = []
        self._allocations: list[Allocation] = []
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
        """The memory of the sums on accelerators; a sum always has the same place in it."""
        return self._buffers

    def clear(self) -> None:
        """Forget everything; tensors handed out before are left alone."""
        if self._sums and not self._buffers:
            self._reusable = ReusableTensors(self._sums)
        self._sums, self._buffers = {}, []
        self.norms = []
        self.let_go()

    def let_go(self) -> None:
        """Free the memory of cleared sums on accelerators as soon as nobody holds them."""
        if not self._sums:
            for reusable in self._reusable_buffers:
                reusable.let_go()

    def _made(self, *, zero: bool) -> dict[str, Tensor]:
        kinds = [*map(_kind, self._parameters.values())]
        if kinds != self._kinds:
            self._kinds, self._allocations = kinds, self._plan_allocations()
            self._reusable_buffers = []
        found = self._used_again(zero=zero) or self._allocated(zero=zero)
        self._reusable = None
        return {name: found[name] for name in self._parameters}

    def _used_again(self, *, zero: bool) -> dict[str, Tensor] | None:
        """The tensors of the last sums with memory again, unless somebody holds some of them."""
        reusable = self._reusable_buffers
        if not reusable or not all(one.take(zero=zero) for one in reusable):
            return None
        self._buffers = [one.buffer for one in reusable]
        return {name: total for one in reusable for name, total in one.sums().items()}

    def _allocated(self, *, zero: bool) -> dict[str, Tensor]:
        made = [one.allocate(zero=zero, reusable=self._reusable) for one in self._allocations]
        self._buffers = [buffer for buffer, _ in made if buffer is not None]
        self._reusable_buffers = []
        if len(self._buffers) == len(made) and counts_are_understood():
            self._reusable_buffers = [
                ReusableBuffer(buffer, sums) for buffer, sums in made if buffer is not None
            ]
        return {name: total for _, sums in made for name, total in sums.items()}

    def _plan_allocations(self) -> list[Allocation]:
        places: dict[tuple[torch.device, torch.dtype], list[str]] = {}
        for name, parameter in self._parameters.items():
            wide = torch.float64 if parameter.dtype == torch.float64 else torch.float32
            places.setdefault((parameter.device, wide), []).append(name)
        planned = []
        for (device, dtype), names in places.items():
            # Whole blocks first, so that the odd sizes of small parameters misalign no other.
            names.sort(key=lambda name: self._parameters[name].numel() % _ALIGNMENT != 0)
            shapes = [self._parameters[name].shape for name in names]
            sizes = [shape.numel() for shape in shapes]
            planned.append(
                Allocation(device=device, dtype=dtype, names=names, shapes=shapes, sizes=sizes)
            )
        return planned
